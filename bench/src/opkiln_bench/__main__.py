"""`python -m opkiln_bench` is `opkiln-bench`."""

from opkiln_bench.app import main

if __name__ == "__main__":
    main()
