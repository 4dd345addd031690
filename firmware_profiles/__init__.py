"""The profile of each kind of board: cores, memory, network, storage, power, and the system to put on it.

The figures live in `boards/*.toml`, and each says where it comes from. None was measured by this project.
"""

from hushfleet.firmware_profiles.board import Board, Quantity, board_names, load_board

__all__ = ["Board", "Quantity", "board_names", "load_board"]
