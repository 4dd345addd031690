"""Defines a 1-D CNN on series `[B, channels, steps]`; a method may keep its last layer, `head`, personal."""

from torch import Tensor, nn


class ActivityNet(nn.Module):
    def __init__(self, classes: int, input_shape: tuple[int, int]) -> None:
        super().__init__()
        channels, steps = input_shape
        self.body = nn.Sequential(
            *(nn.Conv1d(channels, 16, 5, padding=2), nn.ReLU(), nn.MaxPool1d(2)),
            *(nn.Conv1d(16, 16, 5, padding=2), nn.ReLU(), nn.MaxPool1d(2), nn.Flatten()),
            *(nn.Linear(16 * (steps // 4), 32), nn.ReLU()),
        )
        self.head = nn.Linear(32, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))
