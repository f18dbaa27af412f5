"""The chat command `/bench`: runs the speed test of `bench` on the model that the chat has open."""

from typing import TYPE_CHECKING

from llmcli.chat.chat_session import MeasuredSpeed
from llmcli.runtime.runner import Runner

if TYPE_CHECKING:
    from llmcli.bench.speed.measure import SpeedResult

REPETITIONS = 3


def measure(runner: Runner, n_prompt: int, n_gen: int) -> list[MeasuredSpeed]:
    """Measure the prompt and the generation speed of the open model, with the chat's threads, batch
    sizes and cache types. Returns both speeds in this order.

    The test uses its own context, so the conversation's KV cache stays unchanged.
    """
    # imported here, because a chat rarely measures and should start fast
    from llmcli.bench.speed.measure import ModelUnderTest, measure_test
    from llmcli.bench.speed.parameter_grid import SpeedTest

    model, options = runner.model, runner.options
    subject = ModelUnderTest(
        str(runner.header.path), model.description, model.nbytes, model.n_params
    )
    assert options.threads, options
    threads = {"pp": options.threads_batch or options.threads, "tg": options.threads}
    tests = [
        SpeedTest(
            count if kind == "pp" else 0,
            count if kind == "tg" else 0,
            0,
            options.batch_size,
            options.ubatch_size,
            options.cache_type_k,
            options.cache_type_v,
            threads[kind],
            -1,
            options.flash_attn,
        )
        for kind, count in (("pp", n_prompt), ("tg", n_gen))
    ]
    return [_as_speed(measure_test(model, subject, test, REPETITIONS)) for test in tests]


def _as_speed(result: "SpeedResult") -> MeasuredSpeed:
    from llmcli.bench.speed.measure import average, standard_deviation

    rates, gaps = result.samples_ts, result.itl_ms
    return MeasuredSpeed(
        result.test.name,
        average(rates),
        standard_deviation(rates),
        gaps["p50"] if gaps else None,
        gaps["p99"] if gaps else None,
    )
