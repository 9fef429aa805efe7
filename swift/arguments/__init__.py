"""Settings: read from command line, config file and environment, completed, checked, and described.

The fields are defined beside the component that reads them (`swift/<part>/arguments.py`); here they are
composed into one flat dataclass per mode. Importing this package loads neither torch nor an engine.

    resolved = parse("rlhf", sys.argv[2:], os.environ)
    resolved.args.learning_rate, resolved.provenance["learning_rate"], resolved.to_json()
"""

from swift.arguments.modes import MODES
from swift.arguments.parse import Resolved, parse
from swift.arguments.rlhf import RLHFArguments

__all__ = ["MODES", "RLHFArguments", "Resolved", "parse"]
