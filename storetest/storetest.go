// Package storetest tests stores and code that uses them. [Run] is the contract of [tenure.Store]
// as a test suite, for authors of stores. [Mem] is an in-memory store, and [Faulty] injects faults
// into a store, for tests of code that uses one.
package storetest

import (
	"testing"

	"github.com/tenurelib/tenure"
)

// Run tests that a store keeps the contract of [tenure.Store]. Each rule of the
// contract is a subtest, which explains the rule and its purpose when it fails.
// newStore returns an empty store for one subtest, and releases its resources
// with [testing.T.Cleanup]. The rules of [tenure.Lister], [tenure.Fencer], [tenure.Watcher] and
// [tenure.Notifier] are skipped if the store does not implement them, those about lineages if it has
// none, those about names if it is Nameless, and those about hints if a watch does not become live. A store that
// is only a Watcher must have a [tenure.ChangeSubscription] for each key: on it, DeleteIf
// wakes as DeleteAndWake does elsewhere.
//
// The suite does not test what would need a second server, a crash or a lock held by
// another client: that a write survives a crash of the database, and that no call
// waits longer for a lock than its context allows.
func Run(t *testing.T, newStore func(t *testing.T) tenure.Store) {
	for _, rule := range []struct {
		name        string
		explanation string
		check       func(t *testing.T, store *watched)
	}{
		{"a missing object is not found",
			"Get and DeleteIf, at any version, of a key that has no object return ErrNotFound.",
			missingIsNotFound},
		{"an object reads back as it was written",
			"PutIf returns the object as it is stored, with the version (greater than 0) and the times that the store gave it; Get returns the same.",
			readsBackAsWritten},
		{"the store assigns versions and times",
			"PutIf ignores Version, CreatedAt, UpdatedAt and Age of the object that it is given.",
			versionsAndTimesAreTheStores},
		{"age counts from the last write",
			"Age is the time since the last write by the store's own clock. It must never exceed the true age, or a lease would be stolen from a live holder; and it may fall short by no more than the store's resolution (2 ms are allowed), or a dead holder's lease would outlast its TTL. A store that is Clockless has the age 0.",
			ageCountsFromTheLastWrite},
		{"a replaced object keeps its creation time",
			"Replacing an object advances UpdatedAt, never moves it back, and leaves CreatedAt unchanged.",
			replacedKeepsCreatedAt},
		{"a stored object shares no memory with callers",
			"Payload and labels are copied on the way in and on the way out: a caller that modifies its own copy afterwards changes nothing in the store.",
			storedIsNobodysMemory},
		{"a payload is kept byte for byte",
			"A payload is 0 to MaxPayload arbitrary bytes, not text. If the server has a lower limit, the limit is 64 KiB or more, and a larger payload fails with ErrInvalid and is not stored.",
			payloadIsKept},
		{"labels are kept character by character",
			"Labels are any UTF-8 text without NUL. An object without labels may come back with a nil map or an empty one.",
			labelsAreKept},
		{"keys that look alike stay apart",
			"A key is two strings that are compared byte by byte: a store must not concatenate them, fold case, trim, match patterns, normalize Unicode or interpret them as SQL.",
			keysStayApart},
		{"an id under another type is another object",
			"Type and ID together are the key. (A table in which IDs alone are unique returns ErrTaken and keeps the object that it has.)",
			sameIDOfAnotherType},

		{"IfAbsent overwrites nothing",
			"PutIf with IfAbsent of an object that exists returns ErrExists and changes nothing.",
			mustCreateOverwritesNothing},
		{"IfVersion writes at that version only",
			"PutIf with IfVersion replaces the object only if it is at exactly that version. At any other version, older or newer, it changes nothing and returns an ErrConflict that names the wanted and the current version.",
			matchVersionWritesAtThatVersion},
		{"IfVersion creates nothing",
			"PutIf with IfVersion of a missing object returns an ErrConflict whose current version is 0, whether the object never existed or was deleted.",
			matchVersionCreatesNothing},
		{"Unconditional creates and replaces",
			"PutIf with Unconditional succeeds whether the object exists or not.",
			unconditionalCreatesAndReplaces},
		{"DeleteIf deletes at that version only",
			"DeleteIf of an object that is at another version changes nothing and returns an ErrConflict that names the wanted and the current version. A condition that is not an IfVersion is an ErrInvalid.",
			deleteIfDeletesAtThatVersion},

		{"versions go on after a deletion",
			"The version of a write is greater than every version that any object under that key ever had, including deleted ones. Fencing tokens are versions: a repeated token fences nothing.",
			versionsGoOnAfterDeletion},
		{"a stale version fails against a later life",
			"An object that was deleted and created again is a different object: no write or deletion that was meant for the first may affect the second. Versions that restart from 1 would allow that (the ABA problem).",
			staleVersionFails},

		{"of many concurrent creates one succeeds",
			"Of any number of concurrent PutIf calls with IfAbsent for one key exactly one succeeds, and its object is the one stored; the others return ErrExists.",
			oneCreateSucceeds},
		{"of many writes and deletions of one version one succeeds",
			"Of any number of concurrent calls of PutIf with IfVersion and of DeleteIf for one version exactly one succeeds; the others fail with a conflict that names the version that the first one wrote, or find the object gone. Reading the version first and writing afterwards is not enough.",
			oneOfAVersionSucceeds},
		{"of many creates with one name one succeeds",
			"Of any number of concurrent creates of different keys of a type with the same name exactly one succeeds; the others return ErrTaken and store nothing.",
			oneCreateUnderANameSucceeds},
		{"versions rise under concurrent writers",
			"However creates, writes, deletions and reads of a few keys interleave, a version is assigned once, is greater than every version known before its write was sent, and is replaced or deleted once; and a read never returns an older version than was known before it was sent.",
			versionsRiseUnderConcurrency},

		{"a name belongs to one object of its type",
			"PutIf with any condition of an object whose name another object has returns ErrTaken and changes neither object.",
			nameBelongsToOneObject},
		{"a name is free when its object gives it up",
			"An object keeps its own name when it is replaced; another object may take the name once the first has been renamed or deleted.",
			nameIsFreeWhenLeft},
		{"names of other types and empty names never collide",
			"A name is unique among the objects of one type; any number of objects may have no name.",
			namesThatNeverCollide},

		{"a store without names refuses them",
			"In a store that is Nameless, PutIf of an object with a name fails with errors.ErrUnsupported and changes nothing: callers trust a name to be unique.",
			namesAreRefused},

		{"a call whose context has ended returns its error",
			"For a call whose context was cancelled or has passed its deadline, errors.Is reports context.Canceled or context.DeadlineExceeded and no other error of the contract; the store keeps working for others.",
			endedContextIsTheCause},
		{"a cancelled write is atomic",
			"A write whose context ends while it is in progress may or may not have happened, but name, labels and payload are always those of one write; errors.Is reports context.Canceled.",
			cancelledWriteIsNotHalf},
		{"an error names the operation and the key",
			"The text of an error contains the key as Key.String formats it, and differs between Get, PutIf and DeleteIf. Errors end up in logs, far from the call.",
			errorNamesOperationAndKey},
		{"invalid arguments are rejected before anything is sent",
			"Arguments that Key.Validate, Object.Validate or WriteCondition.Validate rejects, and a version to delete that is not positive, fail with ErrInvalid: the same on every store, immediately, and whether or not the context has ended.",
			invalidIsRefused},

		{"a list is sorted, limited and of one type",
			"List returns objects of one type only, as Get returns them, sorted by ID, beginning after the given ID (which need not exist), and at most limit of them.",
			listIsSortedAndCut},
		{"pages of a list fit together",
			"A list is sorted by the same order by which it compares IDs with the one that it begins after, for any text; otherwise paging repeats or skips objects.",
			pagesFitTogether},
		{"tenure.List yields every object once",
			"tenure.List reads a type page by page, however many objects there are.",
			listYieldsEveryObject},
		{"a list whose context has ended returns its error",
			"For a List whose context has ended, errors.Is reports context.Canceled or context.DeadlineExceeded, and the text names the type.",
			listWithEndedContext},

		{"an invalid list is rejected",
			"A limit that is not positive, and a type or an ID that no key can have, fail with ErrInvalid, the same on every store. An empty ID begins with the first object.",
			invalidListIsRefused},

		{"a fence lets the writes of a current term through",
			"The store that Fence returns reads and writes as the store itself does, with the same conditions, for as long as the term's record is in the store: a renewal changes the record's version, not its payload.",
			fenceLetsTermThrough},
		{"a fence that can't work is rejected",
			"Fence of a nil term returns ErrInvalid, never an unfenced store; a fenced store can't be fenced again (errors.ErrUnsupported), because the first fence would be lost; and the lease's own object can't be written through its fence (ErrInvalid).",
			fenceRefuses},
		{"a fence holds back the writes of a term that is over",
			"Once the lease has been released, taken over or deleted, PutIf and DeleteIf of the fenced store return ErrLost and change nothing, whatever their condition. The fence takes precedence: a conflict does not hide the loss.",
			fenceHoldsBack},
		{"a fenced write never follows a takeover",
			"The check and the write are atomic: if a fenced write and a takeover happen at the same time, either the write comes first and the new holder sees it, or it fails with ErrLost and is never visible. A check before the write is not enough.",
			fenceIsAtomic},

		{"a write for another server is refused",
			"A store's Lineage, unless it is zero, names the server and has a mark. A write, a DeleteIf or a DeleteAndWake whose condition names another server returns ErrMoved and changes nothing; a write that names this server gets a version above the least that it asks for. The mark stays the same.",
			writeElsewhereIsRefused},

		{"DeleteAndWake deletes as DeleteIf does",
			"DeleteAndWake returns an ErrConflict at another version, ErrNotFound for a missing object, ErrInvalid for invalid arguments before anything is sent, and the error of a context that has ended; every error names the key. Of many concurrent calls one succeeds. An object that is created afterwards has a greater version.",
			deleteAndWakeIsDeleteIf},
		{"a deletion wakes every watch of the object",
			"When DeleteAndWake has returned nil, every watch of that key that was live before the call receives a hint promptly: however many there are, whether they began before or after the object was created, and whether or not anyone was receiving at the time. DeleteAndWake waits for none of them.",
			deletionWakes},
		{"Wake wakes every watch of the object",
			"When Wake has returned nil, every watch of that key that was live before the call receives a hint, whether or not the object exists. An invalid key fails with ErrInvalid and wakes no watch.",
			wakeWakes},
		{"every change arrives at every watch of the object",
			"The watches of a store on which every change is an event are each a ChangeSubscription. When a write or a deletion has returned nil, every watch of that key that was live before receives promptly, and Last returns what Get does, with the time of arrival; overtaken changes may be left out. This holds for changes by any caller, also through a fence. A watch that has just become live delivers the present state.",
			changesArrive},
		{"a watch may be stopped twice",
			"Stop of a watch that has been stopped, or is being stopped, does nothing and leaves other watches alone.",
			watchIsStoppedTwice},
		{"a fenced deletion wakes while the term is current",
			"The store that Fence returns is a Watcher too, and a Notifier if the store is one. Its DeleteAndWake deletes and wakes as the store's does while the term's record is in the store; afterwards it returns ErrLost and changes nothing; and for the lease's own object it returns ErrInvalid.",
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
