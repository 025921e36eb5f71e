#!/usr/bin/env python3
"""Write a corpus of real image-text pairs under free licences; scripts/real_pairs/README.md describes it.

python scripts/real_pairs.py --output_dir outputs/real_pairs
"""

from real_pairs.corpus import main

if __name__ == "__main__":
    main()
