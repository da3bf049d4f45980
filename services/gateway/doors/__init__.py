"""One file per public protocol: translates its calls to Calls and back."""
