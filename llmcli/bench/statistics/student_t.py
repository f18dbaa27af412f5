"""Quantiles of Student's t."""

import math

import numpy as np


def student_t_quantile(probability: float, degrees_of_freedom: float) -> float:
    """Return the quantile of Student's t distribution at a probability.

    `degrees_of_freedom` need not be an integer. With t = √ν tan θ the density is cos^(ν−1) θ on a
    finite interval, which is integrated on a grid.
    """
    angles = np.linspace(-math.pi / 2, math.pi / 2, 200_001)
    density = np.cos(angles) ** (degrees_of_freedom - 1)
    steps = (density[1:] + density[:-1]) / 2
    below = np.concatenate([[0.0], np.cumsum(steps)])
    return math.sqrt(degrees_of_freedom) * math.tan(
        float(np.interp(probability, below / below[-1], angles))
    )
