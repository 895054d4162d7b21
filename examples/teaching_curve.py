"""The data of a published teaching curve: 3.78 at first, 0.756 after 100 steps, 0.207 after 900.

    asyncpipe-partition --model mlp --stages 2
    asyncpipe-train generated_models/mlp_2p --data examples/teaching_curve.py:data \\
        --schedule 1f1b --steps 1000 --eval-every 100 --momentum 0

Exercise 1 of https://github.com/jinyangli/pathway2ai trains on the first tenth of 10,000 points, 15
batches of 64 in their order, and measures the loss on that tenth. The 40 points that fill no batch
are never trained on, and make almost all of the loss at the end. Its code as published learns more
slowly (1.9 after 100 steps, 0.27 after 900) than the curve that it prints. The scale of the points
is not published: `SCALE` was chosen because it leads to that curve.
"""

import torch
from sklearn.datasets import make_classification
from torch.utils.data import DataLoader, TensorDataset

POINTS, TENTH, BATCH = 10_000, 1_000, 64
SCALE = 20.0


def data() -> tuple[DataLoader, TensorDataset]:
    """The training data in their order, and the evaluation data."""
    points, classes = make_classification(
        n_samples=POINTS,
        n_features=1024,
        n_informative=512,
        n_classes=32,
        n_clusters_per_class=10,
        random_state=0,
    )
    x, target = torch.tensor(points[:TENTH] / SCALE).float(), torch.tensor(classes[:TENTH])
    trained = TENTH // BATCH * BATCH
    whole = TensorDataset(x[:trained], target[:trained])
    return DataLoader(whole, batch_size=BATCH, shuffle=False), TensorDataset(x, target)
