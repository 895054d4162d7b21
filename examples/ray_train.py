"""The loop of own_loop.py in the workers of Ray Train.

pip install "ray[train]"
asyncpipe-partition --model examples/residual_mlp.py:build --stages 2
python examples/ray_train.py generated_models/residual_mlp_2p
"""

import sys
from pathlib import Path

from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def loop(options: dict[str, str]) -> None:
    """Runs in each worker, whose process group of torch the pipeline joins."""
    sys.path.insert(0, options["examples"])
    import own_loop

    own_loop.main(options["folder"], 40)


if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    options = {"examples": str(here), "folder": str(Path(sys.argv[1]).resolve())}
    trainer = TorchTrainer(
        loop,
        train_loop_config=options,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(Path("runs").resolve())),
    )
    trainer.fit()
