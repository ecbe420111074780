package objects

// SessionType is the type of the objects that are the records of sessions.
const SessionType = "tenure.session"

// LineageType is the type and the ID of the object that marks a table's lineage.
const LineageType = "tenure.lineage"

// DrainType is the type of the objects that mark replicas as drained.
const DrainType = "tenure.drain"

// QueueType is the type of the objects that are the records of queues.
const QueueType = "tenure.queue"

// QueueRecord is the payload of a queue's record: where the claims on a table's rows stand. It is for
// operators' tools, which do not know a program's tables.
type QueueRecord struct {
	Schema  string `json:"schema,omitempty"`
	Table   string `json:"table"`
	ID      string `json:"id"` // columns
	Session string `json:"session"`
	Token   string `json:"token"`
}

// SessionLength is the number of characters of a session's ID, which is a UUID. The IDs of remote
// workers' sessions may be longer.
const SessionLength = 36

// Claim is a row of the claims' table.
type Claim struct {
	Kind, ID string
	Session  string // that owns it; empty: it is free
	Token    int64
	Attempts int // of a row of the user's table, if they are counted

	// Exhausted says that a row that was taken has no attempt left.
	Exhausted bool

	// Canceled says of a claim that has ended that the application has canceled the row.
	Canceled bool

	// Row says in a fence that the claim is on a row of the user's table that the kind names.
	Row bool

	// Gone says that the session has no record, so the row is free too. That does not change,
	// because a session begins with its record, and its ID is never used again. Only a single plain
	// SELECT may find this out: the snapshot of a statement that waits for a lock also lacks the
	// record of a session that has begun since.
	Gone bool
}

// Session is a session named by rows of the claims' table.
type Session struct {
	ID     string
	Record *Row  // nil: it has none
	Gone   bool  // it has no record, and has had one
	Wanted bool  // one of the rows was requested
	Server int64 // which start of which server has answered; 0: unknown
}

// ClaimCount is the number of rows of a kind that name a session.
type ClaimCount struct {
	Session, Kind string
	Claims        int
}
