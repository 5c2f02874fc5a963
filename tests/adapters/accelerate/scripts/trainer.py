"""An ordinary Hugging Face Trainer script: it knows nothing of shardplug."""

import json
import os
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


def build():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=257,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
    )


def main(out, batch_size):
    model = build()
    rows = torch.randint(3, 257, (48, 9), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in rows]
    arguments = TrainingArguments(
        output_dir=out,
        per_device_train_batch_size=int(batch_size),
        per_device_eval_batch_size=int(batch_size),
        gradient_accumulation_steps=2,
        max_steps=5,
        learning_rate=1e-3,
        max_grad_norm=0.5,
        logging_steps=1,
        save_strategy="steps",
        save_steps=3,
        report_to=[],
        use_cpu=not torch.accelerator.is_available(),
        dataloader_pin_memory=False,
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:8])
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model(f"{out}/final")
    resumed = Trainer(model=build(), args=arguments, train_dataset=data)
    resumed.train(resume_from_checkpoint=f"{out}/checkpoint-3")
    if trainer.is_world_process_zero():
        history = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
        found = {
            "eval": [before, after],
            "losses": [entry["loss"] for entry in history],
            "norms": [entry["grad_norm"] for entry in history],
            "resumed": [e["loss"] for e in resumed.state.log_history if "grad_norm" in e],
            "class": type(trainer.accelerator).__module__,
            "sharded": sum("DTensor" in type(p.data).__name__ for p in model.parameters()),
            "world": int(os.environ.get("WORLD_SIZE", "1")),
        }
        with open(f"{out}/result.json", "w") as file:
            json.dump(found, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
