"""What is refused, and in which words."""

import pytest

from swift.errors import ConfigError


def problems_of(call, *args, **named):
    """The problems of the ConfigError that a call ends with."""
    with pytest.raises(ConfigError) as error:
        call(*args, **named)
    return error.value.problems
