"""Ask models behind OpenAI's interface, and keep their answers with signals of confidence."""
