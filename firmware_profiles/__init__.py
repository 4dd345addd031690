"""Provides the profile of each kind of board: cores, memory, network, storage, power, and its operating system.

The figures are in `boards/*.toml`, each with its source. This project has measured none of them.
"""

from hushfleet.firmware_profiles.board import Board, Quantity, board_names, load_board

__all__ = ["Board", "Quantity", "board_names", "load_board"]
