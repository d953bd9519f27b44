"""What a fix is called where no Lightning Trainer trains: findings and hints name its settings and a DataLoader's.

To add a setting, add a row. Of https://huggingface.co/docs/transformers/main_classes/trainer#transformers.TrainingArguments
and https://docs.pytorch.org/docs/stable/amp.html (2026-11).
"""

import re
from typing import Final

from msgspec.structs import replace

from lightning_forge_profiling.schema import Analysis

_LOADERS: Final = r"num_workers|persistent_workers|pin_memory|prefetch_factor"
_OF_LOOP: Final = (
    (r'Trainer\((\.\.\., )?precision="bf16-mixed"\)', 'torch.autocast("cuda", torch.bfloat16)'),
    (r"Trainer\(detect_anomaly=\w+\)(  #)? or (?=torch)", ""),
    (r"Trainer\(deterministic=True\) or the call", "torch.use_deterministic_algorithms(True)"),
    (r" \(Trainer\(log_every_n_steps=\.\.\.\)\)", ""),
    (r'Trainer\(precision="64-true"\) and (?=torch)', ""),
    (r', the coverage tool or Trainer\(profiler="advanced"\)', " and the coverage tool"),
    (r'Leave out Trainer\(profiler="pytorch"\), or limit', "Limit"),
    (r" With Trainer\(reload_dataloaders_every_n_epochs=\.\.\.\) they cannot: [^.]*\.", ""),
)
_NAMES: Final = {
    "loop": _OF_LOOP,
    "transformers": (
        (rf"\b({_LOADERS})(?==)", r"dataloader_\1"),
        (r"\bDataLoader\(\.\.\., ", "TrainingArguments(..., "),
        (r"\bin the (validation )?DataLoader\b", "in TrainingArguments"),
        (r"\baccumulate_grad_batches\b", "gradient_accumulation_steps"),
        (r'Trainer\((\.\.\., )?precision="bf16-mixed"\)', r"TrainingArguments(\1bf16=True)"),
        (r"Trainer\(deterministic=True\)", "TrainingArguments(full_determinism=True)"),
        (r"Trainer\(log_every_n_steps=\.\.\.\)", "TrainingArguments(logging_steps=...)"),
        *_OF_LOOP,
    ),
}


def in_words_of(trainer: str, text: str) -> str:
    """A text with the settings of what trains.

    Examples:
        >>> in_words_of("transformers", "DataLoader(..., num_workers=4, pin_memory=True)")
        'TrainingArguments(..., dataloader_num_workers=4, dataloader_pin_memory=True)'
    """
    for pattern, name in _NAMES.get(trainer, ()):
        text = re.sub(pattern, name, text)
    return text


def for_trainer(analysis: Analysis) -> Analysis:
    """The analysis with fixes and hints in the words of what trains."""
    trainer = "lightning" if analysis.run is None else analysis.run.settings.trainer
    if trainer not in _NAMES:
        return analysis
    text, findings = analysis.verdict_text, []
    for each in analysis.findings:  # titles quote the user's own code
        named = replace(each, advice=in_words_of(trainer, each.advice), fix=in_words_of(trainer, each.fix))
        text = text.replace(each.advice, named.advice) if each.advice else text
        findings.append(named)
    hints = tuple(replace(each, text=in_words_of(trainer, each.text)) for each in analysis.hints)
    return replace(analysis, findings=tuple(findings), hints=hints, verdict_text=text)
