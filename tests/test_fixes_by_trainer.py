"""What a fix is called where Hugging Face's Trainer trains, or a loop of the script's own."""

import pytest

from lightning_forge_profiling.diagnosis.trainers import in_words_of


@pytest.mark.parametrize(
    ("text", "transformers", "loop"),
    [
        (
            "DataLoader(..., num_workers=8, persistent_workers=True)",
            "TrainingArguments(..., dataloader_num_workers=8, dataloader_persistent_workers=True)",
            None,
        ),
        ("Set pin_memory=True in the DataLoader", "Set dataloader_pin_memory=True in TrainingArguments", None),
        ("a batch class without a method pin_memory()", "a batch class without a method pin_memory()", None),
        (
            "Its workers stay. With Trainer(reload_dataloaders_every_n_epochs=...) they cannot: do less.",
            "Its workers stay.",
            "Its workers stay.",
        ),
        (
            'Leave out Trainer(profiler="pytorch"), or limit torch.profiler',
            "Limit torch.profiler",
            "Limit torch.profiler",
        ),
        (
            'Trainer(..., precision="bf16-mixed")',
            "TrainingArguments(..., bf16=True)",
            'torch.autocast("cuda", torch.bfloat16)',
        ),
        (
            "Trainer(detect_anomaly=False)  # or torch.autograd.set_detect_anomaly(False)",
            "torch.autograd.set_detect_anomaly(False)",
            "torch.autograd.set_detect_anomaly(False)",
        ),
        (
            "Log less often (Trainer(log_every_n_steps=...)), fewer",
            "Log less often (TrainingArguments(logging_steps=...)), fewer",
            "Log less often, fewer",
        ),
        (
            "Remove Trainer(deterministic=True) or the call",
            "Remove TrainingArguments(full_determinism=True) or the call",
            "Remove torch.use_deterministic_algorithms(True)",
        ),
    ],
)
def test_a_setting_has_the_name_that_it_has_there(text, transformers, loop):
    assert in_words_of("lightning", text) == text
    assert in_words_of("transformers", text) == transformers
    assert in_words_of("loop", text) == (loop or text)
