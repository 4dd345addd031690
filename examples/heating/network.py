"""Defines a 1-D CNN on series `[B, channels, steps]` that predicts one number."""

from torch import Tensor, nn


class HeatingNet(nn.Module):
    def __init__(self, classes: int, input_shape: tuple[int, int]) -> None:
        super().__init__()
        channels, steps = input_shape
        self.body = nn.Sequential(
            *(nn.Conv1d(channels, 8, 5, padding=2), nn.ReLU(), nn.AvgPool1d(2), nn.Flatten()),
            *(nn.Linear(8 * (steps // 2), 32), nn.ReLU()),
        )
        self.head = nn.Linear(32, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))
