"""`python -m hf_infcl` and `accelerate launch -m hf_infcl` are `infcl`."""

from .cli import main

if __name__ == "__main__":
    main()
