"""The benchmark of dynamic sampling: both sides do what they claim, the simulated engine is an engine."""

import pytest

from swift.types import Request, SamplingParams

ROUNDS = 6


@pytest.fixture
def benchmark(monkeypatch):
    from pathlib import Path

    monkeypatch.syspath_prepend(Path(__file__).resolve().parent.parent / "benchmarks")
    import dynamic_sampling
    from harness import halves

    monkeypatch.setattr(halves, "ONE_STEP_S", 0.0)
    monkeypatch.setattr(halves, "ROW_S", 0.0)
    return dynamic_sampling


def turns_of(side, bench):
    turns = side(bench)
    try:
        return [next(turns) for _ in range(ROUNDS)]
    finally:
        turns.close()
        bench.close()


def test_both_sides_train_on_full_units_of_groups_that_teach(benchmark):
    for side in (benchmark.streaming, benchmark.batchwise):
        turns = turns_of(side, benchmark.BENCHES["simulated"]())
        assert [turn.trained_groups for turn in turns] == [16] * ROUNDS
        assert all(len(turn.lengths) == 128 for turn in turns)


def test_batches_are_drawn_whole_and_streaming_draws_no_more_than_it_needs(benchmark):
    whole = turns_of(benchmark.batchwise, benchmark.BENCHES["simulated"]())
    assert all(turn.launched % 16 == 0 and turn.launched >= 32 for turn in whole)
    streamed = turns_of(benchmark.streaming, benchmark.BENCHES["simulated"]())
    assert sum(turn.launched for turn in streamed) < sum(turn.launched for turn in whole)
    assert sum(turn.dropped_tokens for turn in streamed) < sum(turn.dropped_tokens for turn in whole)


def test_streaming_trains_on_every_informative_completion_whatever_its_length(benchmark):
    bench = benchmark.BENCHES["simulated"]()
    turns = turns_of(benchmark.streaming, bench)
    trained = [tokens for turn in turns for tokens in turn.lengths]
    informative = [tokens for turn in turns for tokens in turn.informative_lengths]
    assert len(trained) == 128 * ROUNDS
    assert trained == informative[: len(trained)]  # both in launch order: none is thrown away


def test_the_simulated_engine_fills_its_slots_and_delivers_each_request_once(benchmark):
    from harness.simulated import SimulatedEngine

    engine = SimulatedEngine(slots=3, fixed_s=0.0, row_s=0.0, typical_tokens=5.0)
    asked = [Request(f"r{i}", [i], SamplingParams(max_new_tokens=50, seed=i)) for i in range(8)]
    done = list(engine.generate(asked))
    assert sorted(one.request_id for one in done) == [f"r{i}" for i in range(8)]
    assert {one.request_id: len(one.token_ids) for one in done} == {one.request_id: engine.length(one) for one in asked}
    assert engine.counters.decode_rows == sum(len(one.token_ids) for one in done)
    assert engine.counters.decode_rows <= 3 * engine.counters.decode_steps


def test_only_the_judged_engines_fail_the_benchmark(benchmark):
    rows = [{"engine": name, "ratio_of_means": 0.7} for name in ("simulated", "simulated-full", "transformers-few")]
    assert benchmark.verdict([*rows, {"engine": "vllm-few-tail", "ratio_of_means": 0.6}]) == [
        "simulated: 0.70 of the time of whole batches in the mean, wanted 0.6"
    ]
