"""Quantiles of Student's t."""

import math

import numpy as np


def student_t_quantile(probability: float, degrees_of_freedom: float) -> float:
    """Return the value of Student's t that is exceeded with a probability of 1 - `probability`.

    `degrees_of_freedom` may be a fraction. With t = √ν tan θ the density is cos^(ν−1) θ on a finite
    interval, which is integrated on a grid.
    """
    angles = np.linspace(-math.pi / 2, math.pi / 2, 200_001)
    density = np.cos(angles) ** (degrees_of_freedom - 1)
    steps = (density[1:] + density[:-1]) / 2
    cumulative = np.concatenate([[0.0], np.cumsum(steps)])
    return math.sqrt(degrees_of_freedom) * math.tan(
        float(np.interp(probability, cumulative / cumulative[-1], angles))
    )
