package statuspage_test

import (
	"context"
	"encoding/json"
	"net/http"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	_ "modernc.org/sqlite"

	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/statuspage"
)

func TestTheStatusPageShowsASession(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := testkit.OpenSQLite(t, ":memory:")
		testkit.MigrateClaims(t, store)
		session, err := claims.NewSession(store, claims.SessionConfig{Holder: "a", Labels: map[string]string{"address": "10.0.0.1"}, Logger: testkit.Quiet})
		require.NoError(t, err)
		tenants, err := claims.NewKeys(session, "tenant")
		require.NoError(t, err)
		h := statuspage.Sessions(session)
		_, page := get(t, h, "/", browser)
		wantAll(t, "at first, the", page, `<span class="state wait">no session</span> a`, "session has not begun", "<title>session of a: no session</title>")

		ctx, cancel := context.WithCancel(t.Context())
		returned := make(chan error)
		go func() { returned <- session.Run(ctx) }()
		got, err := tenants.TryClaim(t.Context(), "one", "two", "three")
		require.NoError(t, err)
		did := make(chan error)
		go func() {
			did <- tenants.Do(t.Context(), got[0], func(ctx context.Context) error {
				<-ctx.Done()
				time.Sleep(time.Minute)
				return nil
			})
		}()
		time.Sleep(14 * time.Second)
		_, page = get(t, h, "/", browser)
		wantAll(t, "the", page, `<span class="state good">valid</span> a`, "session "+session.ID(), "10.0.0.1", "<dd>14 s ago</dd>", "<dd>4.0 s ago</dd>", "<dd>25 s <meter", "<dd>30 s</dd>", "<style>",
			`<td data-name="kind">tenant</td><td data-name="claims">3</td><td data-name="running">1</td>`)

		response, data := get(t, h, "/", "")
		require.Equal(t, "application/json", response.Header.Get("Content-Type"))
		var statuses []claims.Status
		require.NoError(t, json.Unmarshal([]byte(data), &statuses))
		require.Len(t, statuses, 1)
		require.Equal(t, []claims.KindStatus{{Kind: "tenant", Claims: 3, Running: 1}}, statuses[0].Kinds)

		cancel()
		time.Sleep(time.Second)
		_, page = get(t, h, "/", browser)
		wantAll(t, "a closing session's", page, `<span class="state wait">closing</span> a`, "Funcs that still run: 1")
		<-did
		require.NoError(t, <-returned)
		_, page = get(t, h, "/", browser)
		wantAll(t, "a closed session's", page, `<span class="state wait">closing</span> a`, "No func runs any more.")
	})
}

// fake is a session with the status that a test gives it.
type fake claims.Status

func (f fake) Status() claims.Status { return claims.Status(f) }

func TestTheStatusPageShowsTheTroubleOfSessionsAndEscapesIt(t *testing.T) {
	_, page := get(t, statuspage.Sessions(fake{Holder: "a", Valid: true, Stuck: true, LastError: "<b>refused"}), "/", browser)
	wantAll(t, "a stuck session's", page, `<span class="state bad">stuck</span>`, "Funcs do not return", "&lt;b&gt;refused")
	_, page = get(t, statuspage.Sessions(fake{Holder: "a", Valid: true, LastError: "refused"}, fake{Holder: "<b>", Valid: true}), "/", browser)
	wantAll(t, "two sessions'", page, `<span class="state bad">error</span> a`, `<span class="state good">valid</span> &lt;b&gt;`)
	response, body := get(t, statuspage.Sessions(), "/", browser)
	require.Equal(t, http.StatusOK, response.StatusCode)
	wantAll(t, "no session's", body, "No sessions.")
}
