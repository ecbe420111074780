package tenure_test

import (
	"context"
	"encoding/json"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/storetest"
)

func TestARecordWithTimesInAnotherUnitSpoilsNoStatus(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := storetest.NewMem()
		key := tenure.Key{Type: "reconciler_lease", ID: "singleton"}
		payload, err := json.Marshal(map[string]any{"holder": "h", "acquired_at_ms": time.Now().UnixNano(), "term": "x", "ttl_ms": 30000})
		if err != nil {
			t.Fatal(err)
		}
		_, err = store.PutIf(t.Context(), tenure.Object{Key: key, Name: "n", Payload: payload}, tenure.MustCreate())
		if err != nil {
			t.Fatal(err)
		}
		lease, err := tenure.NewLease(store, tenure.LeaseConfig{Key: key})
		if err != nil {
			t.Fatal(err)
		}
		c, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{Reconcile: func(ctx context.Context) error { <-ctx.Done(); return nil }})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); c.Run(ctx) }()
		for _, role := range []tenure.Role{tenure.Standby, tenure.Holder} {
			time.Sleep(time.Second)
			w := httptest.NewRecorder()
			tenure.StatusHandler(c).ServeHTTP(w, httptest.NewRequest("GET", "/", nil))
			if got := c.Status().Role; got != role || w.Code != 200 || role == tenure.Standby && strings.Contains(w.Body.String(), "held_since") {
				t.Errorf("the %v is a %v, and is shown by %d %s", role, got, w.Code, w.Body)
			}
			time.Sleep(time.Minute)
		}
		cancel()
		<-done
	})
}
