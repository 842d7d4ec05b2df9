"""Shared by the `live` verbs: templates and translators from configurations, and a warning."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from draftsmith.core.config import bias_warning
from draftsmith.data.prompts import MINI
from draftsmith.live.config import DisplayConfig, LiveConfig, PromptConfig, RedraftConfig
from draftsmith.live.templates import INSTRUCTION, Template

if TYPE_CHECKING:
    from draftsmith.live.replay import ReplaySetting
    from draftsmith.live.translator import LiveTranslator
    from draftsmith.targets.hf import HFTarget


def make_template(options: PromptConfig, target: HFTarget) -> Template:
    """Make the template that the configuration selects.

    Raises:
        InputError: `chat` is selected and the model has no chat template.
    """
    chats = bool(getattr(target.tokenizer, "chat_template", None))
    chat = options.template == "chat" or (options.template == "auto" and chats)
    named = {
        "auto": INSTRUCTION if chats else MINI,
        "chat": INSTRUCTION,
        "mini": MINI,
        "instruction": f"{INSTRUCTION}\n\n",
    }
    text = named.get(options.template, options.template)
    language = options.language.strip()
    return Template(tokenizer=target.tokenizer, language=language, text=text, chat=chat)


def maker(
    target: HFTarget,
    prompt: PromptConfig,
    redraft: RedraftConfig,
    display: DisplayConfig | None = None,
) -> Callable[[ReplaySetting], LiveTranslator]:
    """Return a function that makes a translator per setting; all share the target.

    `display`: what is hidden beside the setting's mask.
    """
    from draftsmith.live.translator import LiveTranslator

    template = make_template(prompt, target)
    display = display or DisplayConfig()

    def make(setting: ReplaySetting) -> LiveTranslator:
        drafts = setting.method == "ssbd"
        values = vars(redraft) | ({} if drafts else {"resync": 0, "then": None})
        config = LiveConfig(
            **values,
            redraft=drafts,
            bias=setting.bias or 0.0,
            trim_draft=setting.mask_k if setting.mask == "draft" else 0,
            context=prompt.context,
            display=replace(display, mask_k=setting.mask_k),
        )
        return LiveTranslator(target, template, config)

    return make


def warn(*biases: float | None) -> None:
    """Print a note about a large bias on stderr."""
    sentence = bias_warning(*biases)
    if sentence is not None:
        print(f"note: {sentence}", file=sys.stderr, flush=True)
