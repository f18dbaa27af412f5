"""Sensitivity on a model whose divergence is a known sum over its tensors."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest

from quant.allocation import probes, sensitivity
from quant.allocation.allocate import Allocation, Budget, TypeMenu, TypeOption, allocate
from quant.allocation.refine import MixRefinement
from quant.allocation.sensitivity import F64, SensitivityRun
from quant.calibration.moments import load_moments
from quant.calibration.moments_writer import MomentSums, write_moments
from quant.errors import UserError
from quant.evaluation.divergence import F32
from quant.native import ggml
from quant.quantize import plan
from quant.quantize.plan import Plan
from quant.quantize.write import open_gguf
from quant.recipes.plan_file import nearest_file_type
from quant.recipes.tensor_types import TypeOverrides
from quant.record_log import RecordLog
from quant.source.source import Source
from tests.quant import tiny_gguf


class FakeStage:
    """Divergence = sum over tensors of factor * squared change / squares, the same at every
    position but for noise.
    """

    def __init__(self, source: Source, factors: Mapping[str, float]) -> None:
        self.original = {
            w.name: ggml.decode(w.read(0, w.rows), w.type, w.columns, label="")
            for w in source.weights
        }
        self.now = {name: values.copy() for name, values in self.original.items()}
        self.factors, self.reads, self.most = factors, 0, 10**9

    def set_rows(self, name: str, first: int, rows: F32) -> None:
        self.now[name][first : first + len(rows)] = rows

    def divergence(self, held_out: bool = False) -> F64:
        self.reads += 1
        if self.reads > self.most:
            raise KeyboardInterrupt
        total = sum(
            self.factors.get(name, 1.0)
            * float(((values - self.now[name]) ** 2).sum() / (values**2).sum())
            for name, values in self.original.items()
        )
        return total * np.linspace(0.5, 1.5, 11)


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return open_gguf(
        tiny_gguf.llama(tmp_path / "m.gguf", layers=2, hidden=64, ff=256, vocab=300, tied=True)
    )


def planner(source: Source) -> Callable[[Mapping[str, str]], Plan]:
    elements = {w.name: w.elements for w in source.weights}
    return lambda mix: plan.plan_quantization(
        source, nearest_file_type(mix, elements), TypeOverrides(mix=mix)
    )


@contextmanager
def sensing(source: Source, path: Path) -> Iterator[SensitivityRun]:
    both = [
        RecordLog.resume(file) or RecordLog.create(file, {})
        for file in (path, path.with_suffix(".errors"))
    ]
    with closing(both[0]), closing(both[1]):
        yield SensitivityRun(
            planner(source), planner(source), sensitivity.type_options(source), both[0], both[1], 1
        )


def factors(source: Source) -> dict[str, float]:
    return {w.name: 0.1 * (1 + number) for number, w in enumerate(source.weights)}


def test_one_measurement_tells_what_every_type_costs_and_costs_add_up(
    source: Source, tmp_path: Path
) -> None:
    stage = FakeStage(source, factors(source))
    with sensing(source, tmp_path / "r") as work:
        parts = probes.all_probes(work.types, grouped=False)
        assert list(work.measure_errors()) == work.open_names
        measured = list(work.measure(parts, stage))
        assert [part.names for part in measured if not part.uses_run_codes] == [
            (name,) for name in work.open_names
        ]
        own = [part.label for part in measured if part.uses_run_codes]
        assert own[-2:] == ["token_embd.weight Q5_1", "token_embd.weight Q8_0"]
        assert "2 tensors of v near 4.5 bits" in own
        assert all(
            np.array_equal(stage.now[name], values) for name, values in stage.original.items()
        )
        found = work.sensitivities(parts)
        for kind in ("Q4_0", "Q5_1", "Q8_0"):
            mix = {name: kind if kind in work.types[name] else "Q5_K" for name in work.open_names}
            sensitivity.write_codes([work.step(name, kind) for name, kind in mix.items()], stage, 1)
            # Errors are of 256 rows; the embedding's 300 are told from most of them.
            expected = sum(
                found[name].loss(kind) - found[name].input_kld(kind) for name, kind in mix.items()
            )
            assert expected == pytest.approx(stage.divergence().mean(), rel=0.01)


@contextmanager
def one_way(source: Source, tmp_path: Path, *names: str) -> Iterator[SensitivityRun]:
    """By GPTQ: nearly all that enters these tensors goes one way, and there it leaves no error."""
    columns, path = 64, tmp_path / "moments.gguf"
    entering = MomentSums(
        (np.eye(columns) + 1e4)[None] * 1200, np.zeros((1, columns)), np.full(1, 1200.0)
    )
    moments, elements = (
        load_moments(write_moments(path, [(names, entering)])),
        {w.name: w.elements for w in source.weights},
    )

    def planned(mix: Mapping[str, str]) -> Plan:
        return plan.plan_quantization(
            source,
            nearest_file_type(mix, elements),
            TypeOverrides(mix=mix),
            method="gptq",
            moments=moments,
        )

    both = RecordLog.create(tmp_path / "r", {}), RecordLog.create(tmp_path / "e", {})
    with closing(both[0]), closing(both[1]):
        yield SensitivityRun(planned, planner(source), sensitivity.type_options(source), *both, 1)


def test_what_a_methods_codes_cost_on_other_text_than_their_moments_is_measured(
    source: Source, tmp_path: Path
) -> None:
    names = [f"blk.{layer}.attn_q.weight" for layer in (0, 1)]
    stage = FakeStage(source, factors(source))  # whose text goes all ways
    with one_way(source, tmp_path, *names) as work:
        parts = probes.all_probes(work.types, grouped=False)
        list(work.measure_errors())
        list(work.measure(parts, stage))
        found = work.sensitivities(parts)
        for kind in ("Q4_0", "Q5_0"):
            sensitivity.write_codes([work.step(name, kind) for name in names], stage, 1)
            truth = stage.divergence().mean()
            assert sum(found[name].predicted_kld(kind) for name in names) < truth / 50
            assert sum(found[name].loss(kind) for name in names) == pytest.approx(truth, rel=0.3)


class Steep(FakeStage):
    """What changes much costs more than in proportion."""

    def divergence(self, held_out: bool = False) -> F64:
        found = super().divergence(held_out)
        return found + 30 * found.mean() ** 2


def test_what_coarse_codes_cost_beyond_proportion_is_measured(
    source: Source, tmp_path: Path
) -> None:
    names = [f"blk.{layer}.ffn_down.weight" for layer in (0, 1)]
    stage = Steep(source, factors(source))
    with sensing(source, tmp_path / "r") as work:
        parts = probes.all_probes(work.types, grouped=False)
        list(work.measure_errors())
        list(work.measure(parts, stage))
        found = work.sensitivities(parts)
        for kind, within in (("Q2_K", 0.01), ("Q3_K", 0.35), ("Q4_K", 0.01)):
            sensitivity.write_codes([work.step(name, kind) for name in names], stage, 1)
            truth = stage.divergence().mean()
            told = sum(found[name].loss(kind) - found[name].input_kld(kind) for name in names)
            assert told == pytest.approx(truth, rel=within)
            if kind == "Q2_K":
                assert sum(found[name].predicted_kld(kind) for name in names) < truth / 2
        coarse = [part.names for part in parts if part.bits == probes.COARSE_PROBE_BITS]
    assert coarse == [tuple(names)], (
        "the other rows are of 64: blocks of 32, of which none is coarser"
    )
    mixed = {names[0]: probes.K_QUANT_TYPES, names[1]: probes.LEGACY_TYPES}
    assert [part.names for part in probes.role_probes(mixed)] == [tuple(names), (names[0],)]


def test_an_embedding_that_is_the_head_costs_what_its_types_are_measured_to(
    source: Source, tmp_path: Path
) -> None:
    name = "token_embd.weight"
    stage = FakeStage(
        source, {**dict.fromkeys(factors(source), 0.0), name: 1.0}
    )  # it knows no head
    with one_way(source, tmp_path, name) as work:
        parts = probes.all_probes(work.types, grouped=False)
        list(work.measure_errors())
        list(work.measure(parts, stage))
        found, unread = work.sensitivities(parts)[name], work.sensitivities([])[name]
        for kind in probes.LEGACY_TYPES:
            sensitivity.write_codes([work.step(name, kind)], stage, 1)
            assert found.loss(kind) == pytest.approx(
                stage.divergence().mean() + found.input_kld(kind)
            )
        # Where nothing was read with it, half is the error of words that are looked up: the head's
        # moments show none.
        assert found.kld and unread.errors["Q5_0"] / unread.probe_error == pytest.approx(
            found.measured_klds["Q5_0"] / found.kld / 2, rel=0.3
        )


def test_what_rounding_the_inputs_adds_is_counted_by_the_blocks_of_each_type(
    tmp_path: Path,
) -> None:
    source = open_gguf(
        tiny_gguf.llama(tmp_path / "m.gguf", layers=1, hidden=256, ff=256, vocab=300)
    )
    stage, name = FakeStage(source, factors(source)), "blk.0.attn_q.weight"
    with sensing(source, tmp_path / "r") as work:
        parts = probes.all_probes(work.types, grouped=False)
        list(work.measure_errors())
        list(work.measure(parts, stage))
        found = work.sensitivities(parts)[name]
    entering = np.random.default_rng(1).normal(size=(2000, 256))
    weights = stage.original[name]
    for kind, size in (("Q6_K", 256), ("Q8_0", 32)):
        blocks = entering.reshape(len(entering), -1, size)
        scales = np.abs(blocks).max(2, keepdims=True) / 127
        rounded = (np.rint(blocks / scales) * scales).reshape(entering.shape)
        added = (((rounded - entering) @ weights.T) ** 2).sum() / (
            (entering @ weights.T) ** 2
        ).sum()
        assert found.inputs[kind] == pytest.approx(added, rel=0.05)
        assert found.input_kld(kind) == pytest.approx(
            found.loss(kind) * added / (found.errors[kind] + added), rel=0.05
        )


def test_what_was_measured_is_there_after_a_kill(source: Source, tmp_path: Path) -> None:
    stage = FakeStage(source, factors(source))
    stage.most = 5
    with sensing(source, tmp_path / "r") as work:
        parts = probes.all_probes(work.types, grouped=False)
        with pytest.raises(KeyboardInterrupt):
            list(work.measure(parts, stage))
    stage = FakeStage(source, factors(source))
    with sensing(source, tmp_path / "r") as work:
        assert work.count_measured(parts) == 5
        assert len(list(work.measure(parts, stage))) == stage.reads == len(parts) - 5


def test_what_was_measured_serves_another_choice_of_types(source: Source, tmp_path: Path) -> None:
    with sensing(source, tmp_path / "r") as work:
        list(
            work.measure(
                probes.all_probes(work.types, grouped=False), FakeStage(source, factors(source))
            )
        )
        list(work.measure_errors())
        klds = {
            name: one.kld
            for name, one in work.sensitivities(
                probes.all_probes(work.types, grouped=False)
            ).items()
        }
        few = sensitivity.type_options(
            source, ["Q4_K", "Q8_0"]
        )  # rows of 64 have no choice of these
        errors = RecordLog.create(tmp_path / "other", {})
        other = SensitivityRun(planner(source), planner(source), few, work.plain_store, errors, 1)
        assert 0 < len(other.open_names) < len(work.open_names)
        list(other.measure_errors())
        for grouped in (False, True):
            assert {name for part in probes.all_probes(few, grouped) for name in part.names} == {
                *other.open_names
            }
        parts = probes.tensor_probes(few, grouped=False)
        assert other.count_measured(parts) == len(parts)
        assert {name: one.kld for name, one in other.sensitivities(parts).items()} == {
            name: klds[name] for name in other.open_names
        }
        assert other.count_measured(probes.all_probes(few, grouped=False)) == len(
            parts
        )  # its own codes are others
        errors.close()


def test_a_tensor_that_shows_in_nothing_may_still_have_the_bytes_that_are_left(
    source: Source, tmp_path: Path
) -> None:
    stage = FakeStage(source, {**factors(source), "blk.0.attn_q.weight": 0.0})
    with sensing(source, tmp_path / "r") as work:
        parts = probes.all_probes(work.types, grouped=False)
        list(work.measure_errors())
        list(work.measure(parts, stage))
        menu = sensitivity.build_menu(work, work.sensitivities(parts), 32)
    most = sum(max(option.nbytes for option in options) for options in menu.values())
    assert set(allocate(menu, Budget(most)).mix.values()) == {"Q8_0"}


def test_a_group_shares_its_divergence_by_the_errors_of_its_tensors(
    source: Source, tmp_path: Path
) -> None:
    with sensing(source, tmp_path / "r") as work:
        parts = probes.all_probes(work.types, grouped=True)
        assert {"blk.0.attn_q.weight", "blk.0.attn_k.weight"} in [set(part.names) for part in parts]
        assert len([part for part in parts if not part.uses_run_codes]) == len(work.open_names) - 4
        list(work.measure_errors())
        list(work.measure(parts, FakeStage(source, {})))
        found = work.sensitivities(parts)
    for name in ("blk.1.ffn_gate.weight", "blk.1.ffn_up.weight"):
        assert found[name].kld == pytest.approx(found[name].probe_error, rel=0.05)


def test_without_a_measurement_errors_rank_and_outliers_are_told(
    source: Source, tmp_path: Path
) -> None:
    parts = np.ones(400)
    parts[7] = 600.0
    assert sensitivity.worst_share(parts) == pytest.approx(603 / 999)
    with sensing(source, tmp_path / "r") as work:
        list(work.measure_errors())
        found = work.sensitivities([])
    assert all(0 < one.columns < 1 and 0 < one.rows < 1 for one in found.values())
    assert all(
        one.kld is None and one.loss("Q8_0") == one.errors["Q8_0"] + one.inputs["Q8_0"]
        for one in found.values()
    )


def test_types_that_rows_cannot_have_are_no_options(source: Source) -> None:
    types = sensitivity.type_options(source)
    assert types["blk.0.attn_q.weight"] == probes.LEGACY_TYPES
    assert types["blk.0.ffn_down.weight"] == probes.K_QUANT_TYPES
    assert "blk.0.attn_norm.weight" not in types
    with pytest.raises(UserError, match="rows of 64, which none of --types allows"):
        sensitivity.type_options(source, ["Q4_K", "Q6_K"])


def test_bytes_move_to_a_role_that_was_taken_too_lightly_and_the_budget_holds() -> None:
    names = [
        f"blk.{i}.{role}.weight" for i in range(4) for role in ("attn_v", "ffn_down", "ffn_up")
    ]
    types = [
        TypeOption("Q4_K", 45, 0.2),
        TypeOption("Q5_K", 55, 0.125),
        TypeOption("Q6_K", 66, 0.0625),
    ]
    menu: TypeMenu = dict.fromkeys(names, types)
    truth = {name: 3.0 if "attn_v" in name else 1.0 for name in names}
    budget = Budget(12 * 55)

    def judge(mix: Mapping[str, str]) -> F64:
        cost = {one.type: one.loss for one in menu[names[0]]}
        return sum(truth[name] * cost[kind] for name, kind in mix.items()) * np.linspace(
            0.9, 1.1, 20
        )

    start = allocate(menu, budget)
    trades = MixRefinement(menu, budget, judge, 6)
    best: Allocation = [*trades.run(start)][-1]
    assert best.nbytes <= budget.tensor_bytes
    assert trades.trials[0].kld == pytest.approx(judge(start.mix).mean())
    assert judge(best.mix).mean() <= 0.9 * trades.trials[0].kld
    assert all(best.options[name].type == "Q6_K" for name in names if "attn_v" in name)
    assert len(trades.trials) <= 7
