"""`python -m hushfleet.aggregator.commands`: the command `hushfleet`, where the script is not on the path."""

from hushfleet.aggregator.commands.main import main

if __name__ == "__main__":
    main()
