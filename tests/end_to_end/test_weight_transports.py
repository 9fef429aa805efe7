"""`--weight_transport` to engines in actors: the run is that of the trainer's own engine, whatever carries the weights.

Those to servers are in `test_server_runs.py`.
"""

import pytest
from cli_runs import log_rows, sampled

pytestmark = pytest.mark.slow

FLAGS = {"max_steps": 3, "save_steps": 100, "max_length": 40, "gradient_checkpointing": "false"}


@pytest.mark.long
@pytest.mark.parametrize("way", [pytest.param("object_store", marks=pytest.mark.long), "broadcast"])
def test_every_transport_to_actors_brings_the_same_weights(cli, way):
    own = cli.finish("own", **FLAGS)
    dedicated = {**FLAGS, "infer_backend": "transformers", "vllm_mode": "dedicated"}
    folder = cli.finish(way, **dedicated, weight_transport=way)
    assert f"gets them by {way}: " in (folder / "logs" / "attempt-1" / "rank-0.log").read_text()
    assert sampled(folder) == sampled(own)
    assert max(row.get("mismatch/logp_abs_diff_max", 0) for row in log_rows(folder)) < 1e-5
