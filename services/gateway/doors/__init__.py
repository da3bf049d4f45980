"""One file per public protocol."""
