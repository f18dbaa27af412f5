"""Choose the number of threads that compute a token: a pure function of processor and model.

After each operation of a graph, the threads of llama.cpp wait for one another, and the more threads
there are, the longer this takes. For a small model on many cores, waiting takes longer than reading
the weights, so that fewer threads are faster. Threads on several memory nodes (NUMA) wait longest;
a model that is read fast enough by one node's cores stays on them.
"""

from llmcli.hardware.processor import Processor
from llmcli.planning.machine import CORE_RATE
from llmcli.planning.prediction.model_layout import ModelLayout
from quant.native.processors import threads_within_quota

LAYER_OPERATIONS = 24  # operations of a layer's graph, after each of which the threads wait
# seconds of a wait: a constant part, and one for each thread; more if the threads are on different
# memory nodes
WAIT_SECONDS, WAIT_SECONDS_PER_THREAD, NODE_FACTOR = 0.3e-6, 0.05e-6, 3.0
# the part of the best speed up to which more threads are preferred, because prompts gain from them
PROMPT_PREFERENCE = 0.95


def choose_threads(processor: Processor, layout: ModelLayout) -> int:
    """Return how many threads compute a token about as fast as possible."""
    limit = processor.usable_cores
    times = {count: seconds_with_threads(processor, layout, count) for count in range(1, limit + 1)}
    best = min(times.values())
    return max(count for count, seconds in times.items() if PROMPT_PREFERENCE * seconds <= best)


def seconds_with_threads(processor: Processor, layout: ModelLayout, count: int) -> float:
    """Return the estimated seconds of a token with `count` threads."""
    node_cores = max(processor.node_cores, default=count)
    factor = NODE_FACTOR if count > threads_within_quota(node_cores, processor.quota) else 1.0
    wait = (WAIT_SECONDS + WAIT_SECONDS_PER_THREAD * count) * factor
    n_operations = LAYER_OPERATIONS * len(layout.layers)
    return layout.bytes_per_token / (count * CORE_RATE) + n_operations * (wait if count > 1 else 0)
