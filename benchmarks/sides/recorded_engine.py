"""A plugin of swift: its engine returns the completions of the file named in RECORDED instead of sampling.

For prompts with images, of which rollout functions make no completions.
"""

import json
import os
from pathlib import Path

from recorded_rollout import text_of

from swift.rollout.engines.transformers import TransformersEngine
from swift.types import Completion

KNOWN = json.loads(Path(os.environ["RECORDED"]).read_text())


async def generate(self, request):
    """The next one of the prompt; its log-probs are not used."""
    ids = KNOWN[text_of(request.prompt.messages)].pop(0)
    return Completion(request.request_id, ids, [0.0] * len(ids), "length", versions=[(self.version, 0, len(ids))])


TransformersEngine.generate = generate
