"""What a chat is, however it is drawn.

records, tree     Node, Attachment, Conversation as they are kept; Tree
store, media      ConversationStore: who has which conversations; MediaStore: files by their SHA-256
database, tables  SQLite
bounds            how much is kept
archive           export and import: ZIP with JSON and the files; markdown: for reading
documents         text and PDF files as context
prompting         from the messages that a person sees to those that the model gets
drafts, settings  what a message will cost, and what would fit
turns             a question with its reply, from what was sent to the store
replies, reply    replies in progress
"""
