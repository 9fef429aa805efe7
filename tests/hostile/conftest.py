from cli_fixtures import cli, material, serve  # noqa: F401
