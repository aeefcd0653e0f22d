"""The trainer: our attention gives eager's gradients, updates survive rounding, stages come in order, and a run that
was interrupted goes on.
"""

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from training import model, state
from training.data import Batches, Job
from training.optimizer import MATRIX_RATE, WEIGHT_DECAY, MasterMuon, orthogonal
from training.recall.samples import Spec
from training.schedule import GATE_AFTER, WARM_UP, Schedule, Stage
from training.train import COMPOUND, Run, fixed_jobs
from training.trainer import Trainer

SMALL = {"pairs": 1, "hidden": 64, "mlp": 96, "window": 32}
CPU = torch.device("cpu")
STAGES = (Stage({512: 1.0}, 1e-3, 0.4, 0.9), Stage({512: 0.5, 1024: 0.5}, 5e-4, 1.0, 2.0))
ANEW = Stage({1024: 1.0}, 4e-4, 0.2, 2.0, anew=True)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def trainer(attention: str = "longreach") -> Trainer:
    return Trainer(model.create(3, **SMALL), CPU, attention=attention, compiled=False)


def test_our_attention_gives_the_gradients_of_eager(corpus: Path) -> None:
    batch = Batches(corpus, 1024)[Job("1", 512)]
    found = {}
    for name in ("longreach", "eager"):
        one = trainer(name)
        losses = one.backward(batch)
        found[name] = losses["answer"], one.net.get_parameter("model.layers.0.self_attn.k_proj.weight").grad
    assert "CPU" in trainer().backend
    for ours, theirs in zip(found["longreach"], found["eager"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=1e-6)


def test_training_learns_and_is_reproduced_by_its_seed(corpus: Path) -> None:
    batch = Batches(corpus, 512)[Job("1", 512)]
    histories = []
    for _ in range(2):
        one = trainer()
        histories.append([one.step(batch, 3e-3)["answer"].item() for _ in range(12)])
    assert histories[0] == histories[1]
    assert histories[0][-1] < 0.7 * histories[0][0]


def test_answered_says_which_questions_greedy_decoding_gets_right(corpus: Path) -> None:
    batch = Batches(corpus, 512)[Job("1", 512, Spec(512, "count"))]
    one = trainer()
    assert not one.answered(batch).any()
    for _ in range(60):
        one.step(batch, 5e-3)
    assert one.answered(batch).tolist() == [True]


def test_layers_that_share_a_mask_share_a_compiled_graph(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[int] = []

    def count(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> object:
        graphs.append(1)
        return graph.forward

    compiled = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda layer, **how: compiled(layer, backend=count, **how))
    net = model.create(3, **{**SMALL, "pairs": 3})
    one = Trainer(net, CPU)
    for length in (512, 1024):
        one.backward(Batches(corpus, 1024)[Job("1", length)])
    assert len(graphs) == 4  # two masks, two lengths


def test_masters_keep_updates_that_bfloat16_would_lose() -> None:
    table = torch.nn.Embedding.from_pretrained(torch.full((4, 4), 0.02), freeze=False)
    start = table.weight.detach().clone()
    optimizer = MasterMuon(table, torch.bfloat16)
    for _ in range(100):
        table.weight.grad = torch.ones_like(table.weight)
        optimizer.rate.fill_(1e-5)
        optimizer.update()
    assert table.weight.dtype == torch.bfloat16
    moved = (start - optimizer.masters[0]).detach()
    torch.testing.assert_close(moved, torch.full((4, 4), 1e-3), rtol=0.05, atol=0)
    assert torch.equal(table.weight, optimizer.masters[0].bfloat16())


@pytest.mark.parametrize("shape", [(2, 48, 48), (3, 96, 32), (1, 32, 96)])
def test_orthogonal_keeps_directions_and_evens_out_their_strength(shape: tuple[int, ...]) -> None:
    left, strength, right = torch.linalg.svd(torch.randn(shape, generator=torch.Generator().manual_seed(1)))
    strength = 0.1 + strength  # what is a thousand times weaker than the rest, five steps do not reach
    count = strength.shape[1]
    found = orthogonal(left[..., :count] * strength[:, None] @ right[:, :count])
    along = left[..., :count].mT @ found @ right[:, :count].mT
    diagonal = along.diagonal(dim1=1, dim2=2)
    assert 0.6 < diagonal.min() <= diagonal.max() < 1.25
    assert (along - torch.diag_embed(diagonal)).abs().max() < 0.05


def test_matrices_move_by_their_rate_and_in_every_direction() -> None:
    layer = torch.nn.Linear(32, 64, bias=False)
    start = layer.weight.detach().clone()
    optimizer = MasterMuon(layer, torch.float32)
    layer.weight.grad = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    optimizer.rate.fill_(1e-3)
    optimizer.update()
    moved = torch.linalg.svdvals((start * (1 - 1e-3 * WEIGHT_DECAY) - optimizer.masters[0]).detach())
    wanted = 1e-3 * MATRIX_RATE * 2**0.5
    assert (moved > 0.6 * wanted).all()
    assert (moved < 1.25 * wanted).all()


def test_a_stage_warms_up_and_ends_by_its_share_or_its_gate() -> None:
    schedule = Schedule(5000, 1, STAGES)
    assert schedule.rate() == pytest.approx(1e-3 / WARM_UP)
    changes = []
    while not schedule.done:
        if schedule.advance():
            changes.append(schedule.step)
            assert schedule.rate() == pytest.approx(5e-4 * (0.01 + 0.99 * 0.6) / WARM_UP)
    assert changes == [2000]
    assert schedule.rate() == pytest.approx(0.01 * 5e-4)

    early = Schedule(5000, 1, STAGES)
    while not early.advance():
        early.observe(512, 0.95)
    assert early.step == GATE_AFTER
    late = Schedule(5000, 1, STAGES)
    while not late.advance():
        late.observe(512, 0.89)
        late.observe(1024, 1.0)  # is no length of this stage
    assert late.step == 2000


def test_in_last_stages_the_rate_falls_anew() -> None:
    schedule = Schedule(6000, 1, (*STAGES, ANEW, dataclasses.replace(ANEW, rate=2e-4)))
    rates = [schedule.rate()]
    changes, remembered = [], []
    while not schedule.done:
        if schedule.advance():
            changes.append(schedule.step)
        if schedule.remembered:
            remembered.append(schedule.step)
        rates.append(schedule.rate())
    assert changes == [2400, 3600, 4800]  # the second stage has what the others leave
    assert remembered == [4800, 6000]
    assert rates[3599] == pytest.approx(0.01 * 5e-4, rel=0.03)
    for begin, rate in ((3600, 4e-4), (4800, 2e-4)):
        assert rates[begin] == pytest.approx(rate / WARM_UP)
        assert rates[begin + 600] == pytest.approx(rate * (0.01 + 0.99 * 0.5))
        assert rates[begin + 1199] == pytest.approx(0.01 * rate, rel=0.1)


def test_without_a_second_descent_nothing_is_remembered() -> None:
    schedule = Schedule(60, 1, STAGES)
    while not schedule.done:
        schedule.advance()
        assert not schedule.remembered


def test_jobs_go_on_where_a_schedule_was_resumed() -> None:
    whole, resumed = Schedule(100, 7, STAGES), Schedule(100, 7, STAGES)
    jobs = whole.jobs()
    first = [next(jobs) for _ in range(30)]
    for _ in range(10):
        whole.advance()
    resumed.resume(whole.position)
    again = resumed.jobs()
    assert [next(again) for _ in range(20)] == first[10:]
    assert len({job.seed for job in first}) == 30
    assert {job.length for job in first} == {512}


def run(one: Trainer, schedule: Schedule, corpus: Path, log: list[dict]) -> Run:
    cells = {"count": [Batches(corpus, 512)[Job("score", 512, Spec(512, "count"))]]}
    return Run(one, schedule, cells, lambda **entry: log.append(entry))


def test_a_run_that_pauses_goes_on_as_if_it_had_not(corpus: Path, tmp_path: Path) -> None:
    def batches(schedule: Schedule):
        source = Batches(corpus, 512)
        return (source[job] for job in schedule.jobs())

    log: list[dict] = []
    whole = Schedule(8, 1, STAGES)
    finished = run(trainer(), whole, corpus, log)
    assert finished.until(batches(whole), lambda: False)
    assert [entry["step"] for entry in log if entry.get("event") == "stage"] == [4]
    assert log[-1]["mean"] == log[-1]["count"] >= 0

    half = Schedule(8, 1, STAGES)
    paused = run(trainer(), half, corpus, [])
    assert not paused.until(batches(half), lambda: half.step == 5)
    state.save(tmp_path, paused.trainer.optimizer, half)

    rest, one = Schedule(8, 1, STAGES), trainer()
    state.load(tmp_path, one.optimizer, rest)
    assert (rest.step, rest.number, rest.begun) == (5, 1, 4)
    for mine, other in zip(one.optimizer.masters, paused.trainer.optimizer.masters, strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-5, atol=1e-9)
    assert run(one, rest, corpus, []).until(batches(rest), lambda: False)
    ends = [r.trainer.optimizer.masters for r in (finished, run(one, rest, corpus, []))]
    for mine, other in zip(*ends, strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-3, atol=2e-5)


def test_a_run_ends_with_the_mean_of_the_last_two_descents(corpus: Path, tmp_path: Path) -> None:
    source = Batches(corpus, 1024)
    stages = (STAGES[0], *[dataclasses.replace(ANEW, share=0.25)] * 2)
    log: list[dict] = []
    schedule, one = Schedule(8, 1, stages), trainer()
    seen: dict[int, list[torch.Tensor]] = {}

    def batches():
        for job in schedule.jobs():
            seen[schedule.step] = [master.detach().clone() for master in one.optimizer.masters]
            if schedule.step == 7:
                state.save(tmp_path, one.optimizer, schedule)
            yield source[job]

    assert run(one, schedule, corpus, log).until(batches(), lambda: False)
    steps = [entry["step"] for entry in log if entry.get("event") == "score"]
    assert steps == [8, 8]  # of the last weights and of the mean

    rest, other = Schedule(8, 1, stages), trainer()
    state.load(tmp_path, other.optimizer, rest)
    assert other.optimizer.remembered == 1
    for mine, end in zip(other.optimizer.mean, seen[6], strict=True):
        torch.testing.assert_close(mine, end, rtol=2e-5, atol=1e-9)
    other.step(source[next(rest.jobs())], rest.rate())
    for mean, end, last in zip(one.optimizer.masters, seen[6], other.optimizer.masters, strict=True):
        torch.testing.assert_close(mean, (end + last) / 2, rtol=2e-3, atol=2e-5)
    for weight, mean in zip(one.optimizer.weights, one.optimizer.masters, strict=True):
        assert torch.equal(weight, mean)


def test_a_state_of_other_sizes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no training state"):
        state.load(tmp_path, trainer().optimizer, Schedule(8, 1))
    one = trainer()
    one.step(_batch(), 1e-3)
    state.save(tmp_path, one.optimizer, Schedule(8, 1))
    other = Trainer(model.create(3, pairs=1, hidden=32, mlp=48), CPU, compiled=False)
    with pytest.raises(ValueError, match="other sizes"):
        state.load(tmp_path, other.optimizer, Schedule(8, 1))


def _batch():
    from training.compare import random_batch

    return random_batch(512, 512, CPU)


def test_the_score_covers_every_task_every_length_and_what_is_held_out() -> None:
    from training.recall.documents import TASKS

    jobs = fixed_jobs(131072, (4096, 16384, 32768))
    held_out = [f"held_out {task}" for task in COMPOUND]
    assert list(jobs) == [*TASKS, "needles/16384", "needles/32768", "held_out/4096", *held_out]
    for name, cell in jobs.items():
        rows = sum(131072 // job.length for job in cell)
        assert rows >= 64, name
        assert {job.unseen for job in cell} == {name.startswith("held_out")}
    assert math.isclose(sum(len(cell) for cell in jobs.values()) * 131072, 9.04e6, rel_tol=0.01)


def test_what_is_exported_loads_and_computes_the_same(tmp_path: Path) -> None:
    net = model.create(5, **SMALL)
    model.export(net, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert loaded.config.layer_types == ["sliding_attention", "full_attention"]
    for name, weight in net.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight.bfloat16()), name
