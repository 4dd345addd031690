"""`python -m hushfleet.aggregator.commands`: the command `hushfleet`, for systems without the script on the path."""

from hushfleet.aggregator.commands.main import main

if __name__ == "__main__":
    main()
