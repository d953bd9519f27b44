"""Transformers with PEFT: low-rank adapters of a small GPT-2, whose batches are tokens."""

import lightning as L
import torch
from digests import print_digest
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

VOCABULARY, LENGTH = 256, 48


class FineTuning(L.LightningModule):
    def __init__(self):
        super().__init__()
        base = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4))
        self.model = get_peft_model(base, LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM"))

    def training_step(self, batch, _index):
        loss = self.model(**batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        adapters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(adapters, lr=1e-3)
        schedule = get_linear_schedule_with_warmup(optimizer, 5, self.trainer.estimated_stepping_batches)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def examples(count):
    tokens = torch.randint(VOCABULARY, (count, LENGTH))
    return [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in tokens]


L.seed_everything(0)
tuning = FineTuning()
trainer = L.Trainer(max_epochs=2, accelerator="cpu", accumulate_grad_batches=2, log_every_n_steps=5)
trainer.fit(tuning, DataLoader(examples(240), batch_size=8, shuffle=True))
tuning.model.print_trainable_parameters()
print_digest(get_peft_model_state_dict(tuning.model))
