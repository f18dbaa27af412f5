"""Measured sensitivities of a fake model whose KL divergence is a known sum over its tensors."""

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
    """Replaces the stage that computes KL divergences with the model.

    The mean divergence is the sum over all tensors of factor * squared change / sum of squares.
    The values of the 11 positions are spread evenly around this mean. `divergence` raises
    `KeyboardInterrupt` after `max_reads` calls.
    """

    def __init__(self, source: Source, factors: Mapping[str, float]) -> None:
        self.original = {
            w.name: ggml.decode(w.read(0, w.rows), w.type, w.columns, label="")
            for w in source.weights
        }
        self.weights = {name: values.copy() for name, values in self.original.items()}
        self.factors, self.reads, self.max_reads = factors, 0, 10**9

    def set_rows(self, name: str, first: int, rows: F32) -> None:
        self.weights[name][first : first + len(rows)] = rows

    def divergence(self, held_out: bool = False) -> F64:
        self.reads += 1
        if self.reads > self.max_reads:
            raise KeyboardInterrupt
        total = sum(
            self.factors.get(name, 1.0)
            * float(((values - self.weights[name]) ** 2).sum() / (values**2).sum())
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
def open_run(source: Source, path: Path) -> Iterator[SensitivityRun]:
    stores = [
        RecordLog.resume(file) or RecordLog.create(file, {})
        for file in (path, path.with_suffix(".errors"))
    ]
    with closing(stores[0]), closing(stores[1]):
        yield SensitivityRun(
            planner(source),
            planner(source),
            sensitivity.type_options(source),
            stores[0],
            stores[1],
            1,
        )


def factors(source: Source) -> dict[str, float]:
    return {w.name: 0.1 * (1 + number) for number, w in enumerate(source.weights)}


def test_losses_of_all_types_follow_from_one_probe_and_add_up(
    source: Source, tmp_path: Path
) -> None:
    stage = FakeStage(source, factors(source))
    with open_run(source, tmp_path / "r") as run:
        probe_list = probes.all_probes(run.types, grouped=False)
        assert list(run.measure_errors()) == run.open_names
        measured = list(run.measure(probe_list, stage))
        assert [probe.names for probe in measured if not probe.uses_run_codes] == [
            (name,) for name in run.open_names
        ]
        own_code_labels = [probe.label for probe in measured if probe.uses_run_codes]
        assert own_code_labels[-2:] == ["token_embd.weight Q5_1", "token_embd.weight Q8_0"]
        assert "2 tensors of v near 4.5 bits" in own_code_labels
        assert all(
            np.array_equal(stage.weights[name], values) for name, values in stage.original.items()
        )
        sensitivities = run.sensitivities(probe_list)
        for kind in ("Q4_0", "Q5_1", "Q8_0"):
            mix = {name: kind if kind in run.types[name] else "Q5_K" for name in run.open_names}
            sensitivity.write_codes([run.step(name, kind) for name, kind in mix.items()], stage, 1)
            # Errors are measured on 256 rows. The embedding has 300, so its errors are estimates.
            expected = sum(
                sensitivities[name].loss(kind) - sensitivities[name].input_kld(kind)
                for name, kind in mix.items()
            )
            assert expected == pytest.approx(stage.divergence().mean(), rel=0.01)


@contextmanager
def rank_one_run(source: Source, tmp_path: Path, *names: str) -> Iterator[SensitivityRun]:
    """Yield a run that quantizes with GPTQ, with moments of nearly rank 1 for the tensors `names`.

    GPTQ leaves almost no error in the one direction of these moments. On activations of other
    directions, the loss is therefore far larger than the moments predict.
    """
    columns, path = 64, tmp_path / "moments.gguf"
    sums = MomentSums.from_matrices(
        (np.eye(columns) + 1e4)[None] * 1200, np.zeros((1, columns)), np.full(1, 1200.0)
    )
    moments, elements = (
        load_moments(write_moments(path, [(names, sums)])),
        {w.name: w.elements for w in source.weights},
    )

    def plan_mix(mix: Mapping[str, str]) -> Plan:
        return plan.plan_quantization(
            source,
            nearest_file_type(mix, elements),
            TypeOverrides(mix=mix),
            method="gptq",
            moments=moments,
        )

    stores = RecordLog.create(tmp_path / "r", {}), RecordLog.create(tmp_path / "e", {})
    with closing(stores[0]), closing(stores[1]):
        yield SensitivityRun(
            plan_mix, planner(source), sensitivity.type_options(source), *stores, 1
        )


def test_gptq_codes_are_measured_on_text_that_their_moments_do_not_cover(
    source: Source, tmp_path: Path
) -> None:
    names = [f"blk.{layer}.attn_q.weight" for layer in (0, 1)]
    stage = FakeStage(source, factors(source))  # all directions of the activations count equally
    with rank_one_run(source, tmp_path, *names) as run:
        probe_list = probes.all_probes(run.types, grouped=False)
        list(run.measure_errors())
        list(run.measure(probe_list, stage))
        sensitivities = run.sensitivities(probe_list)
        for kind in ("Q4_0", "Q5_0"):
            sensitivity.write_codes([run.step(name, kind) for name in names], stage, 1)
            truth = stage.divergence().mean()
            assert sum(sensitivities[name].predicted_kld(kind) for name in names) < truth / 50
            assert sum(sensitivities[name].loss(kind) for name in names) == pytest.approx(
                truth, rel=0.3
            )


class SuperlinearStage(FakeStage):
    """Adds a divergence that grows with the square of the sum: large changes cost more."""

    def divergence(self, held_out: bool = False) -> F64:
        divergence = super().divergence(held_out)
        return divergence + 30 * divergence.mean() ** 2


def test_superlinear_loss_of_coarse_codes_is_measured(source: Source, tmp_path: Path) -> None:
    names = [f"blk.{layer}.ffn_down.weight" for layer in (0, 1)]
    stage = SuperlinearStage(source, factors(source))
    with open_run(source, tmp_path / "r") as run:
        probe_list = probes.all_probes(run.types, grouped=False)
        list(run.measure_errors())
        list(run.measure(probe_list, stage))
        sensitivities = run.sensitivities(probe_list)
        for kind, tolerance in (("Q2_K", 0.01), ("Q3_K", 0.35), ("Q4_K", 0.01)):
            sensitivity.write_codes([run.step(name, kind) for name in names], stage, 1)
            truth = stage.divergence().mean()
            loss = sum(
                sensitivities[name].loss(kind) - sensitivities[name].input_kld(kind)
                for name in names
            )
            assert loss == pytest.approx(truth, rel=tolerance)
            if kind == "Q2_K":
                assert sum(sensitivities[name].predicted_kld(kind) for name in names) < truth / 2
        coarse = [probe.names for probe in probe_list if probe.bits == probes.COARSE_PROBE_BITS]
    assert coarse == [tuple(names)], (
        "rows of 64 columns allow only types with blocks of 32, and none of these is coarser"
    )
    mixed = {names[0]: probes.K_QUANT_TYPES, names[1]: probes.LEGACY_TYPES}
    assert [probe.names for probe in probes.role_probes(mixed)] == [tuple(names), (names[0],)]


def test_each_type_of_a_tied_embedding_is_measured(source: Source, tmp_path: Path) -> None:
    name = "token_embd.weight"
    stage = FakeStage(
        source, {**dict.fromkeys(factors(source), 0.0), name: 1.0}
    )  # the divergence comes from this tensor only
    with rank_one_run(source, tmp_path, name) as run:
        probe_list = probes.all_probes(run.types, grouped=False)
        list(run.measure_errors())
        list(run.measure(probe_list, stage))
        measured, unmeasured = run.sensitivities(probe_list)[name], run.sensitivities([])[name]
        for kind in probes.LEGACY_TYPES:
            sensitivity.write_codes([run.step(name, kind)], stage, 1)
            assert measured.loss(kind) == pytest.approx(
                stage.divergence().mean() + measured.input_kld(kind)
            )
        # Without probes, half of the error is that of the looked-up rows: the moments of the head
        # predict no error.
        assert measured.kld and unmeasured.errors["Q5_0"] / unmeasured.probe_error == pytest.approx(
            measured.measured_klds["Q5_0"] / measured.kld / 2, rel=0.3
        )


def test_input_rounding_error_depends_on_the_block_size_of_each_type(
    tmp_path: Path,
) -> None:
    source = open_gguf(
        tiny_gguf.llama(tmp_path / "m.gguf", layers=1, hidden=256, ff=256, vocab=300)
    )
    stage, name = FakeStage(source, factors(source)), "blk.0.attn_q.weight"
    with open_run(source, tmp_path / "r") as run:
        probe_list = probes.all_probes(run.types, grouped=False)
        list(run.measure_errors())
        list(run.measure(probe_list, stage))
        measured = run.sensitivities(probe_list)[name]
    activations = np.random.default_rng(1).normal(size=(2000, 256))
    weights = stage.original[name]
    for kind, size in (("Q6_K", 256), ("Q8_0", 32)):
        blocks = activations.reshape(len(activations), -1, size)
        scales = np.abs(blocks).max(2, keepdims=True) / 127
        rounded = (np.rint(blocks / scales) * scales).reshape(activations.shape)
        rounding_error = (((rounded - activations) @ weights.T) ** 2).sum() / (
            (activations @ weights.T) ** 2
        ).sum()
        assert measured.inputs[kind] == pytest.approx(rounding_error, rel=0.05)
        assert measured.input_kld(kind) == pytest.approx(
            measured.loss(kind) * rounding_error / (measured.errors[kind] + rounding_error),
            rel=0.05,
        )


def test_measurements_survive_a_kill(source: Source, tmp_path: Path) -> None:
    stage = FakeStage(source, factors(source))
    stage.max_reads = 5
    with open_run(source, tmp_path / "r") as run:
        probe_list = probes.all_probes(run.types, grouped=False)
        with pytest.raises(KeyboardInterrupt):
            list(run.measure(probe_list, stage))
    stage = FakeStage(source, factors(source))
    with open_run(source, tmp_path / "r") as run:
        assert run.count_measured(probe_list) == 5
        assert len(list(run.measure(probe_list, stage))) == stage.reads == len(probe_list) - 5


def test_measurements_are_reused_for_another_choice_of_types(
    source: Source, tmp_path: Path
) -> None:
    with open_run(source, tmp_path / "r") as run:
        list(
            run.measure(
                probes.all_probes(run.types, grouped=False), FakeStage(source, factors(source))
            )
        )
        list(run.measure_errors())
        klds = {
            name: measured.kld
            for name, measured in run.sensitivities(
                probes.all_probes(run.types, grouped=False)
            ).items()
        }
        fewer_types = sensitivity.type_options(
            source, ["Q4_K", "Q8_0"]
        )  # neither type divides rows of 64 columns
        errors = RecordLog.create(tmp_path / "other", {})
        second_run = SensitivityRun(
            planner(source), planner(source), fewer_types, run.plain_store, errors, 1
        )
        assert 0 < len(second_run.open_names) < len(run.open_names)
        list(second_run.measure_errors())
        for grouped in (False, True):
            assert {
                name for probe in probes.all_probes(fewer_types, grouped) for name in probe.names
            } == {*second_run.open_names}
        probe_list = probes.tensor_probes(fewer_types, grouped=False)
        assert second_run.count_measured(probe_list) == len(probe_list)
        assert {
            name: measured.kld for name, measured in second_run.sensitivities(probe_list).items()
        } == {name: klds[name] for name in second_run.open_names}
        assert second_run.count_measured(probes.all_probes(fewer_types, grouped=False)) == len(
            probe_list
        )  # the probes of the run's own codes are not measured yet
        errors.close()


def test_tensor_without_measured_loss_gets_the_unused_bytes(source: Source, tmp_path: Path) -> None:
    stage = FakeStage(source, {**factors(source), "blk.0.attn_q.weight": 0.0})
    with open_run(source, tmp_path / "r") as run:
        probe_list = probes.all_probes(run.types, grouped=False)
        list(run.measure_errors())
        list(run.measure(probe_list, stage))
        menu = sensitivity.build_menu(run, run.sensitivities(probe_list), 32)
    largest_size = sum(max(option.nbytes for option in options) for options in menu.values())
    assert set(allocate(menu, Budget(largest_size)).mix.values()) == {"Q8_0"}


def test_divergence_of_a_group_is_split_by_the_errors_of_its_tensors(
    source: Source, tmp_path: Path
) -> None:
    with open_run(source, tmp_path / "r") as run:
        probe_list = probes.all_probes(run.types, grouped=True)
        assert {"blk.0.attn_q.weight", "blk.0.attn_k.weight"} in [
            set(probe.names) for probe in probe_list
        ]
        assert (
            len([probe for probe in probe_list if not probe.uses_run_codes])
            == len(run.open_names) - 4
        )
        list(run.measure_errors())
        list(run.measure(probe_list, FakeStage(source, {})))
        sensitivities = run.sensitivities(probe_list)
    for name in ("blk.1.ffn_gate.weight", "blk.1.ffn_up.weight"):
        assert sensitivities[name].kld == pytest.approx(sensitivities[name].probe_error, rel=0.05)


def test_without_probes_the_loss_is_the_error_and_outlier_shares_are_reported(
    source: Source, tmp_path: Path
) -> None:
    errors = np.ones(400)
    errors[7] = 600.0
    assert sensitivity.worst_share(errors) == pytest.approx(603 / 999)
    with open_run(source, tmp_path / "r") as run:
        list(run.measure_errors())
        sensitivities = run.sensitivities([])
    assert all(
        0 < measured.columns < 1 and 0 < measured.rows < 1 for measured in sensitivities.values()
    )
    assert all(
        measured.kld is None
        and measured.loss("Q8_0") == measured.errors["Q8_0"] + measured.inputs["Q8_0"]
        for measured in sensitivities.values()
    )


def test_types_that_do_not_divide_the_row_length_are_not_options(source: Source) -> None:
    types = sensitivity.type_options(source)
    assert types["blk.0.attn_q.weight"] == probes.LEGACY_TYPES
    assert types["blk.0.ffn_down.weight"] == probes.K_QUANT_TYPES
    assert "blk.0.attn_norm.weight" not in types
    with pytest.raises(UserError, match="rows of 64, which none of --types allows") as caught:
        sensitivity.type_options(source, ["Q4_K", "Q6_K"])
    assert caught.value.hint == "add Q4_0 or Q4_1 or Q5_0 or Q5_1 or Q8_0 to --types"


def test_iq_types_are_options_of_tensors_whose_input_has_statistics(source: Source) -> None:
    guided = {"token_embd.weight", "blk.0.attn_q.weight", "blk.0.ffn_down.weight"}
    types = sensitivity.type_options(source, guided=guided)
    assert types["blk.0.attn_q.weight"] == (*probes.LEGACY_TYPES, "IQ4_NL")
    assert types["blk.0.ffn_down.weight"] == probes.K_QUANT_TYPES + probes.IQ_TYPES
    assert types["blk.1.ffn_down.weight"] == probes.K_QUANT_TYPES
    assert types["token_embd.weight"] == probes.LEGACY_TYPES
    chosen = sensitivity.type_options(source, ["Q4_0", "IQ4_NL"], guided)
    assert set(chosen.values()) == {("Q4_0", "IQ4_NL")}


def test_a_role_with_iq_types_is_measured_in_one_of_them_apart_from_the_others() -> None:
    names = ["blk.0.ffn_down.weight", "blk.1.ffn_down.weight"]
    types = {names[0]: probes.K_QUANT_TYPES + probes.IQ_TYPES, names[1]: probes.K_QUANT_TYPES}
    fine, coarse, codebook = probes.role_probes(types)
    assert (fine.names, coarse.names, codebook.names) == (tuple(names), tuple(names), (names[0],))
    kinds = [probe.type_of(types[names[0]]) for probe in (fine, coarse, codebook)]
    assert kinds == ["Q4_K", "Q2_K", "IQ3_XXS"]
    assert codebook.label == names[0]
    only_iq = dict.fromkeys(names, ("IQ2_XXS", "IQ3_XXS", "IQ4_XS"))
    assert [probe.uses_codebook for probe in probes.role_probes(only_iq)] == [False, False]


def test_the_correction_of_iq_types_is_their_own() -> None:
    factors = {"Q4_K": 2.0, "Q2_K": 8.0, "IQ3_XXS": 1.0}
    assert sensitivity.interpolate_factor(factors, "IQ2_XS") == 1.0
    assert sensitivity.interpolate_factor(factors, "Q6_K") == pytest.approx(2.0)
    assert 2 < sensitivity.interpolate_factor(factors, "Q3_K") < 8
    assert sensitivity.interpolate_factor({"Q4_K": 2.0}, "IQ4_XS") == pytest.approx(2.0)


def test_a_hint_names_only_types_that_divide_the_row_length(tmp_path: Path) -> None:
    model = tiny_gguf.llama(tmp_path / "odd.gguf", hidden=172, heads=2, ff=344, layers=1)
    with pytest.raises(UserError, match="rows of 172, which none of --types allows") as caught:
        sensitivity.type_options(open_gguf(model), ["Q4_0", "Q5_0"])
    assert caught.value.hint == "add F16 to --types"


def test_refinement_moves_bytes_to_an_underestimated_role_within_the_budget() -> None:
    names = [
        f"blk.{i}.{role}.weight" for i in range(4) for role in ("attn_v", "ffn_down", "ffn_up")
    ]
    types = [
        TypeOption("Q4_K", 45, 0.2),
        TypeOption("Q5_K", 55, 0.125),
        TypeOption("Q6_K", 66, 0.0625),
    ]
    menu: TypeMenu = dict.fromkeys(names, types)
    factors = {name: 3.0 if "attn_v" in name else 1.0 for name in names}
    budget = Budget(12 * 55)

    def judge(mix: Mapping[str, str]) -> F64:
        losses = {option.type: option.loss for option in menu[names[0]]}
        return sum(factors[name] * losses[kind] for name, kind in mix.items()) * np.linspace(
            0.9, 1.1, 20
        )

    start = allocate(menu, budget)
    refinement = MixRefinement(menu, budget, judge, 6)
    best: Allocation = [*refinement.run(start)][-1]
    assert best.nbytes <= budget.tensor_bytes
    assert refinement.trials[0].kld == pytest.approx(judge(start.mix).mean())
    assert judge(best.mix).mean() <= 0.9 * refinement.trials[0].kld
    assert all(best.options[name].type == "Q6_K" for name in names if "attn_v" in name)
    assert len(refinement.trials) <= 7
