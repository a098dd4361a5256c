"""BytePS's own server behind its copy of ps-lite: pslite.py under another name."""

import pslite

if __name__ == "__main__":
    pslite.main()
