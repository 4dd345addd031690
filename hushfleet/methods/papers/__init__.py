"""Methods of single papers, a file each; `hushfleet.methods` finds them by name."""
