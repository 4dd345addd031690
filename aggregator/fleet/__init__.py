"""The fleet: its folder, its boards, and how boards enrol, are watched and are updated. A process of its own."""
