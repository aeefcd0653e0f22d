"""What requests may say, endpoint by endpoint, and how a body is checked.

Every field is strictly typed and bounded here, before anything is spent on it. JSON `true` is not a number, `"7"` is
not 7, and a field that is not listed is refused by name. A field that OpenAI has and this server does not honour is
listed with its neutral values, which clients send unasked; any other value is refused.
"""
