"""An ordinary Accelerate script: it knows nothing of shardplug."""

import json
import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

WINDOW = 3


def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Embedding(257, 18),
        torch.nn.Linear(18, 37),
        torch.nn.GELU(),
        torch.nn.Linear(37, 257),
    )


def rows(count):
    return torch.randint(0, 257, (count, 9), generator=torch.Generator().manual_seed(1))


def loss_of(model, batch):
    return torch.nn.functional.cross_entropy(
        model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()
    )


def main(out, log_with=None):
    accelerator = Accelerator(
        gradient_accumulation_steps=WINDOW, log_with=log_with, project_dir=out
    )
    accelerator.init_trackers("native", config={"window": WINDOW})
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    loader = DataLoader(rows(28), batch_size=2)
    held_out = DataLoader(rows(7), batch_size=2)
    model, optimizer, loader, held_out, scheduler = accelerator.prepare(
        model, optimizer, loader, held_out, scheduler
    )
    losses, norms = [], []
    for epoch in range(2):
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                loss = loss_of(model, batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
            accelerator.log({"loss": losses[-1]}, step=len(losses))
        model.eval()
        predictions = []
        for batch in held_out:
            with torch.no_grad():
                best = model(batch).argmax(-1)
            predictions.append(accelerator.gather_for_metrics(best))
        assert torch.cat(predictions).shape == (7, 9)
        accelerator.save_state(f"{out}/epoch_{epoch}")
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        found = {
            "losses": losses,
            "norms": norms,
            "sum": sum(float(tensor.double().abs().sum()) for tensor in state.values()),
            "class": type(accelerator).__module__,
            "sharded": sum("DTensor" in type(p.data).__name__ for p in model.parameters()),
            "argv": sys.argv[1:],
        }
        with open(f"{out}/result.json", "w") as file:
            json.dump(found, file)
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
