import pytest
from cli_fixtures import cli, material, serve  # noqa: F401
from cli_runs import Cli


@pytest.fixture(scope="module")
def finished(material, tmp_path_factory):  # noqa: F811
    """Makes whole runs that all tests of a file may read; the folder of each."""

    def run(**flags):
        with Cli(*material, tmp_path_factory.mktemp("straight")) as runs:
            return runs.finish("straight", **flags)

    return run
