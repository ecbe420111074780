package claims

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/pace"
)

// ownerTable is a table whose rows name their owners: the table of claims, or one of the user's.
type ownerTable struct {
	rows     objects.ClaimStore
	groups   *groups       // of its statements
	limit    time.Duration // of a statement
	requests bool          // whether it keeps requests
	name     string        // of the user's table; empty: it is the table of claims
}

// look returns the rows with these IDs that exist.
func (t *ownerTable) look(ctx context.Context, kind string, ids []string) (rows []objects.Claim, err error) {
	err = inGroups(t.groups, ids, func(ids []string) error {
		some, err := t.rows.Look(ctx, kind, ids, t.limit)
		rows = append(rows, some...)
		return err
	}, nil)
	return rows, err
}

// owned returns the rows of a kind that a session owns, after a given row, and whether there may be more.
func (t *ownerTable) owned(ctx context.Context, kind, session, after string) (rows []objects.Claim, more bool, err error) {
	n, err := t.groups.page(ctx, perStatement, func(n int) (err error) {
		rows, err = t.rows.Owned(ctx, session, kind, after, n, t.limit)
		return err
	})
	more = len(rows) == n
	if i := slices.IndexFunc(rows, func(r objects.Claim) bool { return r.Kind != kind }); i >= 0 {
		rows, more = rows[:i], false
	}
	return rows, more, err
}

// rowsOf returns the rows of claims as they are now, by their IDs.
func (t *ownerTable) rowsOf(ctx context.Context, kind string, claims []objects.Claim) (map[string]objects.Claim, error) {
	now, err := t.look(ctx, kind, idsOf(claims))
	rows := make(map[string]objects.Claim, len(now))
	for _, row := range now {
		rows[row.ID] = row
	}
	return rows, err
}

// standing returns which claims have ended, and which still stand.
func (t *ownerTable) standing(ctx context.Context, kind string, rows []objects.Claim) (ended, stand []objects.Claim, err error) {
	if len(rows) == 0 {
		return nil, nil, nil
	}
	owners, err := t.rowsOf(ctx, kind, rows)
	if err != nil {
		return nil, nil, err
	}
	for _, row := range rows {
		if now := owners[row.ID]; now.Session != row.Session || now.Token != row.Token {
			ended = append(ended, row)
		} else {
			stand = append(stand, row)
		}
	}
	return ended, stand, nil
}

// owner returns the holder of the session that owns a row, or [tenure.ErrNotFound].
func (t *ownerTable) owner(ctx context.Context, store tenure.Store, logger *slog.Logger, kind, id string) (tenure.Holding, error) {
	owners, err := t.owners(ctx, store, logger, kind, []string{id})
	if err != nil {
		return tenure.Holding{}, err
	}
	if holding, owned := owners[id]; owned {
		return holding, nil
	}
	return tenure.Holding{}, tenure.ErrNotFound
}

// owners returns the holders of the sessions that own rows, by the rows' IDs. If it can't read some of the
// records, it still returns the other holders.
func (t *ownerTable) owners(ctx context.Context, store tenure.Store, logger *slog.Logger, kind string, ids []string) (map[string]tenure.Holding, error) {
	if err := t.validKeys(kind, ids); err != nil {
		return nil, err
	}
	rows, err := t.look(ctx, kind, ids)
	if err != nil {
		return nil, err
	}
	owned := make(map[string][]string) // by session
	for _, r := range rows {
		if r.Session != "" && !r.Gone {
			owned[r.Session] = append(owned[r.Session], r.ID)
		}
	}
	owners := make(map[string]tenure.Holding, len(rows))
	var unread error
	for session, ids := range owned {
		lease, err := tenure.NewLease(store, tenure.LeaseConfig{Key: SessionKey(session), Logger: logger})
		if err != nil {
			return nil, err
		}
		holding, err := lease.Read(ctx)
		if errors.Is(err, tenure.ErrNotFound) { // it has ended since
			continue
		} else if err != nil {
			unread = errors.Join(unread, err)
			continue
		}
		for _, id := range ids {
			owners[id] = holding
		}
	}
	return owners, unread
}

// request stores requests for rows, and wakes their owners.
func (t *ownerTable) request(ctx context.Context, store tenure.Store, kind string, ids []string) error {
	return inGroups(t.groups, ids, func(ids []string) error {
		requested, err := t.rows.Request(ctx, kind, ids, t.limit)
		if err != nil {
			return err
		}
		t.wakeOwners(store, requested)
		return nil
	}, nil)
}

// wakeOwners wakes the sessions that rows name, to read their requests.
func (t *ownerTable) wakeOwners(store tenure.Store, rows []objects.Claim) {
	woken := make(map[string]bool)
	for _, r := range rows {
		if !woken[r.Session] {
			woken[r.Session] = true
			wake(store, requestsKey(r.Session), t.limit)
		}
	}
}

// validKeys rejects an empty list, keys that can't be claimed, and keys that are given twice.
func (t *ownerTable) validKeys(kind string, ids []string) error {
	if len(ids) == 0 {
		return fmt.Errorf("%w: no keys are given", tenure.ErrInvalid)
	}
	seen := make(map[string]bool, len(ids))
	for _, id := range ids {
		switch err := objects.ValidText("key", id); {
		case err != nil:
			return err
		case id == "":
			return fmt.Errorf("%w: a key is empty", tenure.ErrInvalid)
		case seen[id]:
			return fmt.Errorf("%w: the key %q is given twice", tenure.ErrInvalid, id)
		}
		seen[id] = true
	}
	return t.fits(kind, ids...)
}

// fits rejects keys that are too long for the database.
func (t *ownerTable) fits(kind string, ids ...string) error {
	most := t.rows.LongestKey()
	for _, id := range append([]string{""}, ids...) {
		if n := len(kind) + len(id); most > 0 && n > most {
			return fmt.Errorf("%w: key %q of kind %q has %d bytes together with its kind: the database's indexes allow %d (use a hash of it)",
				tenure.ErrInvalid, shortened(id), shortened(kind), n, most)
		}
	}
	return nil
}

// shortened returns a text, or only its beginning if it is long.
func shortened(s string) string {
	const most = 50
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "") + "…"
}

// awaitUnlocked pauses before rows that another transaction has locked are tried again. The pause holds no
// connection. It returns false once ctx is done.
func awaitUnlocked(ctx context.Context, tries int) bool {
	return pace.Sleep(ctx, 5*time.Millisecond<<min(tries, 7))
}

func idsOf(rows []objects.Claim) []string {
	ids := make([]string, 0, len(rows))
	for _, r := range rows {
		ids = append(ids, r.ID)
	}
	return ids
}

func setOf(ids []string) map[string]bool {
	set := make(map[string]bool, len(ids))
	for _, id := range ids {
		set[id] = true
	}
	return set
}

func tokensOf(rows []objects.Claim) []int64 {
	tokens := make([]int64, 0, len(rows))
	for _, r := range rows {
		tokens = append(tokens, r.Token)
	}
	return tokens
}
