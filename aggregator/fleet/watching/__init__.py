"""What a fleet shows of itself: the columns of boards, problems, the terminal and Home Assistant."""
