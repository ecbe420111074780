package objects

// CountedTo is how far the claims of one session on keys of one kind are counted.
const CountedTo = 1_000_000

// ClaimCount is how many keys of a kind a session owns, by the rows that name it: at most
// [CountedTo], which then stands for that and more.
type ClaimCount struct {
	Session, Kind string
	Claims        int
}
