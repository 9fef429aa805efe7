"""The part of Qwen2.5-Omni that reads images and text: vision tower and language model of its thinker.

transformers' class of the whole checkpoint has no forward pass, and that of the thinker joins decoder and head. Here
they are apart, as in other models that see, and keep their names in the checkpoint. Modules of `NOT_LOADED` are not
made. Importing this lets transformers' automatic classes find the model.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForImageTextToText, GenerationMixin, Qwen2_5OmniConfig
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniPreTrainedModel,
    Qwen2_5OmniThinkerForConditionalGeneration,
)
from transformers.utils.generic import can_return_tuple

from swift.models.multimodal import NOT_LOADED


class ThinkerModel(Qwen2_5OmniThinkerForConditionalGeneration):  # type: ignore[misc]
    """Vision tower and decoder. config: of the whole checkpoint."""

    _tied_weights_keys = None
    _no_split_modules = Qwen2_5OmniPreTrainedModel._no_split_modules

    def __init__(self, config: Any) -> None:
        super().__init__(config.thinker_config)
        config.hidden_size = config.get_text_config().hidden_size  # where DeepSpeed's automatic sizes look for it
        del self.audio_tower, self.lm_head

    def get_rope_index(self, *args: Any, mm_token_type_ids: Any = None, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """That of the thinker, which finds the images in the ids."""
        return super().get_rope_index(*args, **kwargs)  # type: ignore[no-any-return]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Hidden states, as `last_hidden_state`."""
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        if pixel_values is not None:
            seen = torch.cat(self.get_image_features(pixel_values, image_grid_thw, return_dict=True).pooler_output)
            places, _, _ = self.get_placeholder_mask(input_ids, inputs_embeds, image_features=seen)
            inputs_embeds = inputs_embeds.masked_scatter(places, seen.to(inputs_embeds))
        if position_ids is None:
            position_ids = self.compute_3d_position_ids(
                input_ids, image_grid_thw, None, inputs_embeds, attention_mask, past_key_values
            )
        return self.model(
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )


class Qwen2_5OmniForConditionalGeneration(Qwen2_5OmniPreTrainedModel, GenerationMixin):  # type: ignore[misc]  # noqa: N801
    """The language model over it; has the name of transformers' class, which configs of checkpoints record."""

    base_model_prefix = "thinker"
    _tied_weights_keys: ClassVar = {"thinker.lm_head.weight": "thinker.model.embed_tokens.weight"}
    _keys_to_ignore_on_load_unexpected: ClassVar = [rf"^{name}\." for name in NOT_LOADED]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        text = config.get_text_config()
        self.thinker = ThinkerModel(config)
        self.thinker.lm_head = nn.Linear(text.hidden_size, text.vocab_size, bias=False)
        self.thinker._tied_weights_keys = Qwen2_5OmniThinkerForConditionalGeneration._tied_weights_keys
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        """The head."""
        return self.thinker.lm_head  # type: ignore[no-any-return]

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the head."""
        self.thinker.lm_head = new_embeddings

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits, and the loss of labels."""
        output = self.thinker(input_ids, **kwargs)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.thinker.lm_head(output.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1], **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=output.past_key_values,
            hidden_states=output.hidden_states,
            attentions=output.attentions,
        )


for auto, kind in ((AutoModel, ThinkerModel), (AutoModelForImageTextToText, Qwen2_5OmniForConditionalGeneration)):
    # `register` refuses a config of transformers
    auto._model_mapping._extra_content[Qwen2_5OmniConfig] = kind  # type: ignore[attr-defined]
