//! Files that change while servers and clients use them.
