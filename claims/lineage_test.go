package claims_test

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/proof/kit"
	"github.com/tenurelib/tenure/storetest"
)

// failingOver is a database that says that it has failed over.
type failingOver struct {
	*tenure.SQLiteStore
	at atomic.Pointer[time.Time]
}

func (f *failingOver) Lineage(context.Context) (tenure.Lineage, error) {
	at := *f.at.Load()
	return tenure.Lineage{Server: at.String(), Mark: at.String(), Age: time.Since(at)}, nil
}

func (f *failingOver) failOver() {
	now := time.Now()
	f.at.Store(&now)
}

func TestASessionWhoseRenewalsAFailoverMayHaveLostIsNotBuriedForATTL(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db := &failingOver{SQLiteStore: kit.OpenSQLite(t, ":memory:")}
		db.failOver()
		time.Sleep(time.Hour)
		w := newWorld(t, db)
		a := w.start("a")
		a.claim("1")
		b := w.start("b")
		var named atomic.Value
		b.fault(func(ctx context.Context, call storetest.Call, do func(context.Context) error) error {
			if call.Op == "delete" {
				named.Store(objects.ServerOf(ctx))
			}
			return do(ctx)
		})
		key := claims.SessionKey(a.session.ID())
		time.Sleep(time.Second)
		a.crash()
		time.Sleep(ttl - 2*time.Second)
		db.failOver()
		time.Sleep(ttl - 100*time.Millisecond)
		_, err := w.store.Get(w.Context(), key)
		require.NoError(w, err, "it may live")
		time.Sleep(ttl)
		_, err = w.store.Get(w.Context(), key)
		require.ErrorIs(w, err, tenure.ErrNotFound)
		on, err := db.Lineage(t.Context())
		require.NoError(t, err)
		require.Equal(t, on.Server, named.Load(), "it names the server on which that was decided")
	})
}
