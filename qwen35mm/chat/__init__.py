"""The chat application without its user interface.

records, tree     Node, Attachment, Conversation as they are stored; Tree
store, media      ConversationStore: who has which conversations; MediaStore: files by their SHA-256
database, tables  SQLite
bounds            storage limits
archive           export and import: ZIP with JSON and the files; markdown: for reading
documents         text and PDF files as context
prompting         turns stored messages into the model's prompt
drafts, settings  what a message will cost, and what would fit
turns             stores a question and begins its reply
replies, reply    replies in progress
"""
