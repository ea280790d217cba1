"""The conversation: prompt and template, streamed answers, slash commands, the prompt line."""
