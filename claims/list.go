package claims

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
)

// Listing is what sessions owned at one moment.
type Listing struct {
	Claims []Claim   // in no order
	At     time.Time // the moment, by the database's clock; zero if there were no claims
}

// Age returns how old a claim of the listing was, by the database's clock: negative if the clock
// was set back since.
func (l Listing) Age(c Claim) time.Duration { return l.At.Sub(time.UnixMicro(c.Token)) }

// List returns the claims of all sessions on keys of some kinds, as of one moment: one
// statement. Those of sessions that are gone are not listed. A process that has crashed is
// listed until its session has expired and was removed. It is meant for kinds of some thousand
// keys. It works whether Run runs or not.
func (s *Session) List(ctx context.Context, kinds ...string) (Listing, error) {
	listing, err := s.list(ctx, kinds)
	return listing, opError("list claims of "+strings.Join(kinds, ", "), err)
}

func (s *Session) list(ctx context.Context, kinds []string) (Listing, error) {
	if len(kinds) == 0 || slices.Contains(kinds, "") {
		return Listing{}, fmt.Errorf("%w: a kind is missing", tenure.ErrInvalid)
	}
	for _, kind := range kinds {
		if err := objects.ValidText("kind", kind); err != nil {
			return Listing{}, err
		}
	}
	rows, at, err := s.claims.OfKinds(ctx, kinds, s.limit)
	if err != nil {
		return Listing{}, err
	}
	listing := Listing{Claims: make([]Claim, 0, len(rows)), At: at}
	for _, r := range rows {
		listing.Claims = append(listing.Claims, claimOf(r.Kind, r.Session, r))
	}
	return listing, nil
}
