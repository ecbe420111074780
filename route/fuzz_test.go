package route_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/textproto"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/route"
)

// FuzzAForwardedRequest sends a request with any two headers to the owner of a key. It may be refused, or run once and be
// answered with the owner's token; nothing else, and the next honest request is answered.
func FuzzAForwardedRequest(f *testing.F) {
	store := testkit.OpenSQLite(f, f.TempDir()+"/route.db")
	testkit.MigrateClaims(f, store)
	session := testkit.Must(claims.NewSession(store, claims.SessionConfig{Labels: map[string]string{"address": "127.0.0.1:1"}, Logger: testkit.Quiet}))
	keys := testkit.Must(claims.NewKeys(session, "tenant"))
	rt := testkit.Must(route.Keys(keys, tenantOf, route.Config{}))
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- session.Run(ctx) }()
	f.Cleanup(func() { cancel(); <-ended })
	got, err := keys.Claim(ctx, "x")
	require.NoError(f, err)
	ran := 0
	go keys.Do(ctx, got[0], func(ctx context.Context) error {
		return rt.Serve(ctx, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			if ran++; r.Header["Tenure-Route"] != nil {
				panic("a handler sees the header")
			}
		}))
	})
	testkit.Await(f, "it is served", func() bool { o, _ := rt.Owner(ctx, "x"); return o.Local })

	honest := fmt.Sprintf("to=%s; least=%d; wait=9; key=x", session.ID(), got[0].Token)
	f.Add("Tenure-Route", honest, "Tenure-Route", "to=; least=0; wait=0")
	f.Add("tenure-route", honest, "TENURE-ROUTE", honest)
	f.Add("Tenure-Route", "to="+session.ID()+"; least=-9223372036854775808; wait=-1", "Tenure-Token", "9223372036854775807")
	f.Add("Tenure-Route", "to=x; least=99999999999999999999; wait=1e9", "Tenure-Request", "refused")
	f.Add("Tenure-Route", strings.TrimSuffix(honest, "; key=x"), "Tenure-Route", strings.Replace(honest, "key=x", "key=y", 1))
	f.Add("Tenure-Route", "to=%s; least=%d;; wait=", "Expect", "100-continue")
	f.Fuzz(func(t *testing.T, name, value, name2, value2 string) {
		header := http.Header{}
		for name, value := range map[string]string{name: value, name2: value2} {
			if textproto.TrimString(name) == "" || strings.ContainsAny(name+value, "\r\n\x00") {
				t.Skip()
			}
			header.Add(name, value) // as net/http does, in the canonical case
		}
		before := ran
		r := httptest.NewRequest("POST", "http://any/x", nil)
		r.Header = header
		w := httptest.NewRecorder()
		rt.ServeHTTP(w, r)
		switch fate := w.Header().Get("Tenure-Request"); {
		case w.Code == 421 && fate == "refused" && ran == before && header["Tenure-Route"] != nil:
		case w.Code == 200 && fate == "" && ran == before+1 && w.Header().Get("Tenure-Token") == fmt.Sprint(got[0].Token):
		default:
			t.Errorf("%q: %d %v, and ran %d times", header, w.Code, w.Header(), ran-before)
		}
		next := post(rt, "/x")
		require.Equal(t, 200, next.Code, "the next request")
		if _, err := rt.Owner(ctx, "x"); err != nil || !session.Valid() {
			t.Error("the key or the session is gone", err)
		}
	})
}
