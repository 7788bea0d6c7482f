{{- define "eagle-server.name" -}}
{{- printf "%s-eagle" .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "eagle-server.selector" -}}
app.kubernetes.io/name: eagle-server
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "eagle-server.labels" -}}
{{ include "eagle-server.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- /* The process ends at most 90 s after its last token: docs/deployment.md. */ -}}
{{- define "eagle-server.graceSeconds" -}}
{{- add (int .Values.drain.preStopSeconds) (int .Values.drain.longestAnswerSeconds) 90 -}}
{{- end -}}

{{- define "eagle-server.config" -}}
{{- toYaml .Values.options -}}
{{- end -}}

{{- define "eagle-server.scheme" -}}
{{- if .Values.tls.secret }}https{{ else }}http{{ end -}}
{{- end -}}

{{- /* What the server reads once, at its start. `lookup` finds nothing in `helm template`, which asks no cluster. */ -}}
{{- define "eagle-server.secrets" -}}
{{- range $name := list .Values.apiKeys.secret .Values.tls.secret .Values.hubToken.secret -}}
{{- if $name -}}
{{- with lookup "v1" "Secret" $.Release.Namespace $name -}}
{{- toYaml .data -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
