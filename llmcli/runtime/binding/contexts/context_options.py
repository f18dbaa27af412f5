"""The settings with which a llama.cpp context is opened."""

from dataclasses import dataclass

from llmcli.runtime.binding.contract import MAX_SEQUENCES as MAX_SEQUENCES


@dataclass(frozen=True, slots=True)
class ContextOptions:
    """Settings of a context, named as in llama_context_params where they exist there. Sizes are in
    tokens.

    - `n_seq_max`: maximum number of sequences.
    - `unified`: all sequences share one pool of cells. If False, each sequence has `n_ctx` /
      `n_seq_max` cells for itself.
    - `n_outputs`: maximum rows of logits in a pass; at least one per sequence is always possible.
    - `offload_kqv`: the KV cache of a layer is on the device of the layer. If False, all of it is on
      the host.
    - `swa_full`: layers with a sliding window keep every cell, in order, and no work is offloaded
      to a GPU. The reproducible mode sets it.
    - `can_append`: cells that another context computed can be appended to a sequence.
    - `has_spare`: one more sequence is there, with which a part of another one's state is read
      (`Context.read_range`). `can_append` also adds it.
    - `n_rs_seq`: by how many tokens recurrent state can go back, where the architecture and the
      micro-batches support this (`usable_rs_seq`). The memory of the state grows by this factor
      plus one.
    - `outputs_states`: keep the hidden state of every row of a pass, from which a prediction context
      (prediction_context.py) predicts further tokens.
    - `outputs_final_states`: make the final hidden states of passes readable in which every row has
      logits (`Context.final_state`).
    - `n_branches`: additional sequences for the branches of a tree of tokens.
    - `gemm_min_rows`: llmcli's own matrix products compute passes with at least this many rows, if
      they are available (kernels/gemm.py); 0 for no pass.
    """

    n_ctx: int
    n_batch: int = 2048
    n_ubatch: int = 512
    n_seq_max: int = 1
    n_threads: int = 1
    n_threads_batch: int = 1
    type_k: str = "f16"
    type_v: str = "f16"
    flash_attn: str = "auto"
    unified: bool = True
    n_outputs: int = 1
    offload_kqv: bool = True
    swa_full: bool = False
    can_append: bool = False
    has_spare: bool = False
    gemm_min_rows: int = 0
    n_rs_seq: int = 0
    outputs_states: bool = False
    outputs_final_states: bool = False
    n_branches: int = 0

    @property
    def n_sequences(self) -> int:
        """Return the number of sequences that llama.cpp allocates: `n_seq_max`, one with
        `can_append`, which holds the earlier cells of a sequence while others are appended, or with
        `has_spare`, and `n_branches`.
        """
        return self.n_seq_max + (self.can_append or self.has_spare) + self.n_branches

    @property
    def batch_rows(self) -> int:
        """Return the number of rows of a pass that llama.cpp allocates."""
        return max(self.n_batch, self.n_sequences, self.n_outputs)

    @property
    def usable_rs_seq(self) -> int:
        """Return `n_rs_seq`, or 0 if micro-batches are too small for it. llama.cpp computes the last
        tokens of a sequence, one more than `n_rs_seq`, in one micro-batch, and ends the process if
        this has no row for another token (split_equal in src/llama-batch.cpp).
        """
        micro_batch_rows = min(self.n_ubatch, self.batch_rows)
        return self.n_rs_seq if micro_batch_rows > self.n_rs_seq + 1 else 0
