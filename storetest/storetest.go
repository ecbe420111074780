// Package storetest holds the contract of [tenure.Store] as a test suite, for
// those who write a store, and a store in memory, [Mem], with faults where one
// wants them, [Faulty], for those who test what stands on a store.
package storetest

import (
	"testing"

	"github.com/tenurelib/tenure"
)

// Run tests that a store keeps the contract of [tenure.Store]: a subtest for
// each rule of it, which says when it fails what the rule is and what it is
// for. newStore returns an empty store, for one subtest, and sees to its end
// with [testing.T.Cleanup]. The rules of [tenure.Lister], [tenure.Fencer] and
// [tenure.Watcher] are skipped for a store that is none, and those of hints where
// a watch does not become live.
//
// What needs a second server, a crash or somebody's lock is not in the suite:
// that a write outlives the database's crash, and that no call waits longer
// for a lock than its context allows.
func Run(t *testing.T, newStore func(t *testing.T) tenure.Store) {
	for _, rule := range []struct {
		name        string
		explanation string
		check       func(t *testing.T, store *watched)
	}{
		{"a missing object is not found",
			"Get, and DeleteIf at any version, of a key that has no object is ErrNotFound.",
			missingIsNotFound},
		{"an object reads back as it was written",
			"PutIf returns the object as it is stored, with the version (above 0) and the times that the store gave it; Get returns the same.",
			readsBackAsWritten},
		{"versions and times are the store's",
			"Version, CreatedAt, UpdatedAt and Age of the object that is handed to PutIf are ignored.",
			versionsAndTimesAreTheStores},
		{"age counts from the last write",
			"Age is the time since the last write by the store's own clock. It is never more than the truth, or a lease would be stolen from a holder that lives; and it is less by no more than the store's resolution (2 ms are allowed), or a dead holder's lease would be held for longer than its TTL.",
			ageCountsFromTheLastWrite},
		{"a replaced object keeps its time of creation",
			"Replacing an object moves UpdatedAt, never back, and leaves CreatedAt.",
			replacedKeepsCreatedAt},
		{"a stored object is nobody else's memory",
			"Payload and labels are copied on the way in and on the way out: what a caller does with its own afterwards changes nothing in the store.",
			storedIsNobodysMemory},
		{"a payload is kept byte for byte",
			"A payload is 0 to MaxPayload bytes of any value, not text.",
			payloadIsKept},
		{"labels are kept character by character",
			"Labels are any UTF-8 text without NUL. No labels may come back as nil or as an empty map.",
			labelsAreKept},
		{"keys that look alike stay apart",
			"A key is two strings that are compared byte by byte: no joining of the two, no folding of case, trimming, patterns or Unicode normalization, and nothing in them is SQL.",
			keysStayApart},
		{"an id under another type is another object",
			"Type and ID together are the key. (A table on which IDs alone are unique answers ErrTaken and keeps what it has.)",
			sameIDOfAnotherType},

		{"MustCreate overwrites nothing",
			"PutIf with MustCreate on an object that exists is ErrExists and changes nothing.",
			mustCreateOverwritesNothing},
		{"MatchVersion writes at that version only",
			"PutIf with MatchVersion replaces the object that is at this very version. At any other, older or yet to come, it changes nothing and is a *ConflictError that names the wanted and the current version.",
			matchVersionWritesAtThatVersion},
		{"MatchVersion creates nothing",
			"PutIf with MatchVersion where there is no object is a *ConflictError whose current version is 0, whether there never was one or it was deleted.",
			matchVersionCreatesNothing},
		{"Unconditional creates and replaces",
			"PutIf with Unconditional succeeds whether the object exists or not.",
			unconditionalCreatesAndReplaces},
		{"DeleteIf deletes at that version only",
			"DeleteIf of an object that is at another version changes nothing and is a *ConflictError that names the wanted and the current version.",
			deleteIfDeletesAtThatVersion},

		{"versions go on after a deletion",
			"The version of a write is greater than every version that any object under that key ever had, also one deleted since. Fencing tokens are versions: one that comes twice fences nothing.",
			versionsGoOnAfterDeletion},
		{"a stale version fails against a later life",
			"An object that was deleted and created anew is another one: no write or deletion that was meant for the first may hit the second. A version that starts from 1 again lets it (the ABA problem).",
			staleVersionFails},

		{"of many creates at once one succeeds",
			"Of any number of concurrent PutIf with MustCreate of one key exactly one succeeds, and its object is what is stored; the others are ErrExists.",
			oneCreateSucceeds},
		{"of many writes and deletions of one version one succeeds",
			"Of any number of concurrent PutIf with MatchVersion and DeleteIf of one version exactly one succeeds; the others fail with the version that it left, or find the object gone. Reading the version first and writing afterwards is not enough.",
			oneOfAVersionSucceeds},
		{"of many creates under one name one succeeds",
			"Of any number of concurrent creates of different keys of a type under one name exactly one succeeds; the others are ErrTaken and leave nothing.",
			oneCreateUnderANameSucceeds},
		{"versions rise under concurrent writers",
			"However creates, writes, deletions and reads of a few keys interleave: a version is given once, is greater than every version known before its write was sent, and is replaced or deleted once; and a read finds no older version than was known before it was sent.",
			versionsRiseUnderConcurrency},

		{"a name belongs to one object of its type",
			"PutIf, whatever its condition, of an object under another's name is ErrTaken and changes nothing, neither object.",
			nameBelongsToOneObject},
		{"a name is free when its object leaves it",
			"An object keeps its own name when it is replaced; another may take the name when the object has been renamed or deleted.",
			nameIsFreeWhenLeft},
		{"names of other types and empty names never collide",
			"A name is unique among the objects of one type, and no name is no collision.",
			namesThatNeverCollide},

		{"a call whose context has ended says so",
			"The error of a call whose context was cancelled or has passed its deadline is context.Canceled or context.DeadlineExceeded by errors.Is, and nothing else of the contract; the store works on for others.",
			endedContextIsTheCause},
		{"a write that is cancelled midway is not half a write",
			"A write whose context ends under way may or may not have happened, but name, labels and payload are always those of one write; the error is context.Canceled by errors.Is.",
			cancelledWriteIsNotHalf},
		{"an error says which operation on which key",
			"The text of an error contains the key as Key.String writes it, and differs between Get, PutIf and DeleteIf. It ends up in a log, far from its caller.",
			errorNamesOperationAndKey},
		{"invalid arguments are refused before anything is sent",
			"What Key.Validate, Object.Validate and WriteCondition.Validate refuse, and a version to delete that is not positive, is ErrInvalid: the same on every store, at once, and whether the context has ended or not.",
			invalidIsRefused},

		{"a list is sorted, cut and of one type",
			"List returns the objects of one type only, as Get returns them, in the order of their IDs, those after the given ID (which need not exist), and at most limit.",
			listIsSortedAndCut},
		{"pages of a list fit together",
			"The order of a list and the comparison with the ID that it begins after are the same, for any text: else paging repeats or skips objects.",
			pagesFitTogether},
		{"tenure.List yields every object once",
			"tenure.List reads a type page by page, however many objects there are.",
			listYieldsEveryObject},
		{"a list whose context has ended says so",
			"The error of a List whose context has ended is context.Canceled or context.DeadlineExceeded by errors.Is, and names the type.",
			listWithEndedContext},

		{"an invalid list is refused",
			"A limit that is not positive, and a type or an ID that no key can have, are ErrInvalid: the same on every store. An ID may be empty, to begin with the first.",
			invalidListIsRefused},

		{"a fence lets the writes of a standing term through",
			"The store that Fence returns reads and writes as the store itself does, with the same conditions, for as long as the term's record stands: renewals change its version, not its payload.",
			fenceLetsTermThrough},
		{"a fence that can't hold is refused",
			"Fence of no term is ErrInvalid, never a store without a fence; a store that is fenced already can't be fenced again (errors.ErrUnsupported), for the first fence would be lost; and the lease's own object can't be written through its fence (ErrInvalid).",
			fenceRefuses},
		{"a fence holds back the writes of a term that is over",
			"Once the lease was released, taken over or deleted, PutIf and DeleteIf of the fenced store are ErrLost and change nothing, whatever their condition. The fence is the last to be asked: a conflict does not hide the loss.",
			fenceHoldsBack},
		{"a fenced write never follows a takeover",
			"Check and write are one: of a fenced write and a takeover at the same time, either the write is first and whoever took over finds it, or it is ErrLost and nobody ever does. A check before the write is not enough.",
			fenceIsAtomic},

		{"DeleteAndWake deletes as DeleteIf does",
			"DeleteAndWake at another version is a *ConflictError and of a missing object ErrNotFound; invalid arguments are ErrInvalid before anything is sent; the error of a context that has ended is its cause, and every error names the key. Of many at once one succeeds. What is created afterwards has a greater version.",
			deleteAndWakeIsDeleteIf},
		{"a deletion wakes all who watch the object",
			"When DeleteAndWake has returned nil, every watch of that key which was live before receives, and soon: however many there are, whether they began before the object was there or since, and whether anybody was receiving at that time. DeleteAndWake waits for none of them.",
			deletionWakes},
		{"Wake wakes all who watch the object",
			"When Wake has returned nil, every watch of that key which was live before receives, whether there is an object or not. An invalid key is ErrInvalid, and wakes nobody.",
			wakeWakes},
		{"a watch may be stopped twice",
			"Stop of a watch that was stopped, or is being stopped, does nothing, and least of all to the watches of others.",
			watchIsStoppedTwice},
		{"a fenced deletion wakes while the term stands",
			"The store that Fence returns is a Watcher too. Its DeleteAndWake deletes and wakes as the store's does while the term's record stands; afterwards it is ErrLost and changes nothing; and it is ErrInvalid for the lease's own object.",
			fencedDeletionWakes},
	} {
		t.Run(rule.name, func(t *testing.T) {
			defer func() {
				if t.Failed() {
					t.Logf("The rule: %s", rule.explanation)
				}
			}()
			rule.check(t, watch(t, newStore(t)))
		})
	}
}
